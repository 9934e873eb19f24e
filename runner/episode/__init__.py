"""One episode: its life, its conversations, their turns, and the limits on all of them."""
