"""Detection of a chat template's traits by rendering probes: at a run's start and in check-template."""
