"""Serves an episode to agent programs over HTTP: three wire forms of requests, one way to answer them."""
