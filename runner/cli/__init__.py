"""The command line: one module per command, and the terminal displays of a run."""
