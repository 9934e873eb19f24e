"""Clocks, threads, cancellation and the event loop: what every other package builds on."""
