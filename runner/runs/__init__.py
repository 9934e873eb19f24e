"""Runs: what one is given, what of it is running, how its results are read, and the process around it."""
