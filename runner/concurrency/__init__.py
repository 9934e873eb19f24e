"""Clocks, threads, cancellation and the event loop, for all other packages."""
