"""The remote engine: token ids to an HTTP server and deltas back, in the server's own dialect."""
