"""Whole episodes on many machines: a driver, its workers, and the messages between them."""
