"""Tools: schemas of an author's functions, and validation of arguments from a model."""
