"""The author's side: environment classes, where they are found, their tasks and their lifespan."""
