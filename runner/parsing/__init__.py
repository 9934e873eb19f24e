"""Parsing of turns: reasoning, content and calls, in a format learnt from the chat template."""
