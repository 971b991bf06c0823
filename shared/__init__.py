"""The contract of both services: wire, specs, configuration. Never imports torch."""
