"""One episode: its life cycle, its conversations, their turns, and the limits on all of them."""
