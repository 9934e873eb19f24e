"""The token fix-up: the ids of a next prompt, which begins with exactly the ids that were sampled."""
