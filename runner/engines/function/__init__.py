"""Engine over a function that takes and returns token ids."""
