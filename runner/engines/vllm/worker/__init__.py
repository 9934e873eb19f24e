"""What runs inside vLLM's own processes; imported there, so it imports little."""
