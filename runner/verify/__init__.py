"""Verification of a run file: prompts, turns and records are built again and compared."""
