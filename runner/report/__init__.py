"""Pages and comparisons of run files, for people."""
