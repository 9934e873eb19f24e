"""Token ids: vocabularies, chat templates, and the log of all ids of a segment."""
