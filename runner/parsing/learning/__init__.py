"""Learning of turn formats from renders of a chat template."""
