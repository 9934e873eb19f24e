"""Episodes on many machines, each as a whole on one worker: a driver, its workers, and the messages between them."""
