"""Parsing: how a template writes a turn, learnt from its renders; from a turn's text to thought, content and calls."""
