"""Bridging: the next prompt begins with exactly the ids that the model saw and sampled."""
