"""Run files: trajectories in SQLite, written in groups and read lazily."""
