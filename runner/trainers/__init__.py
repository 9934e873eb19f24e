"""Adapters to trainers of other libraries. Each library is imported on first use."""
