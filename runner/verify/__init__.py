"""Looks at what a run file says and builds it again from what the model was given."""
