"""Many engines, many machines: whole episodes are played on workers, and one run keeps what came of them."""
