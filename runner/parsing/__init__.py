"""Parsing of turns: reasoning, content and calls, in a format learnt from renders of the chat template."""
