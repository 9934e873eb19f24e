"""Learning: from what a template renders to the format of its turns."""
