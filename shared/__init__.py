"""What both services agree on: the wire, the specs, the configuration. Never imports torch."""
