"""Runs: options, start, episodes in flight, results, live display, and the event loop."""
