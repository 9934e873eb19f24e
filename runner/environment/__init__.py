"""Environments: the class that authors subclass, loading by name, tasks, and lifespan."""
