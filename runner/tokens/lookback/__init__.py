"""Whether what a template writes behind a turn can depend on what came before it, read from the template's source."""
