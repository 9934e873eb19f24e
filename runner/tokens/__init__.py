"""Token ids: vocabularies, chat templates, and the log of what was sampled."""
