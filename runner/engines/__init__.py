"""Engines: samplers of token ids for prompts of token ids, and the parts that all engines share."""
