"""vLLM's AsyncLLM in this process, as an engine."""
