"""The command line: one module a command, and what shows a run in a terminal."""
