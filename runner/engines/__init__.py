"""Engines: what samples token ids for prompts of token ids, and what every one of them shares."""
