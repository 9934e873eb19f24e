"""Adapters to trainers of other libraries. None is imported before it is used."""
