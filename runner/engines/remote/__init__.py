"""Remote engine, which sends token ids to an HTTP server and reads the deltas, in the server's own dialect."""
