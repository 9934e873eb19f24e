"""Episodes on many machines: a driver, its workers, and their messages. One worker plays an episode as a whole."""
