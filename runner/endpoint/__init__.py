"""Serves an episode to agent programs over HTTP: three wire forms of requests, and one request handler."""
