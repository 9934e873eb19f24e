"""Tools: an author's functions as a model sees them, and the checks of what it passes."""
