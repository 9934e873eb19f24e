"""Environments: the base class for authors, loading by name, tasks, and lifespan."""
