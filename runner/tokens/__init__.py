"""The token layer: templates, vocabularies, the token log and the bridge between turns."""
