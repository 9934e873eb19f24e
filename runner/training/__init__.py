"""What a trainer takes: trajectories as arrays, padded, packed, as one token tree, with the grammar's masks."""
