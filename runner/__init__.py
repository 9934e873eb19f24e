"""deltarunner: plays multi-turn agent environments against a language model in the same process."""
