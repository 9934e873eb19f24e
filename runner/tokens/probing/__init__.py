"""What a chat template does, learnt by rendering probes: at a run's start and in check-template."""
