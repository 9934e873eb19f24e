"""The fleet on Ray: workers and shared engines as actors."""
