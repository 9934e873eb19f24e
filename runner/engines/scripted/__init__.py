"""Engine that samples the ids of a script."""
