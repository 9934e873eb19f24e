"""Environment linter: it plays an environment without a model and reports its mistakes."""
