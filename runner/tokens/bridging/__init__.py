"""The token fix-up: ids of a next prompt that begin with the very ids that were sampled."""
