"""Sandboxes: containers of podman or docker in which episodes run commands, and the protocol of other providers."""
