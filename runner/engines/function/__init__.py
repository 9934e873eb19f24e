"""A function that takes token ids and gives token ids as the engine."""
