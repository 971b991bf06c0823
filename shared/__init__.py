"""The contract of both services: wire, specs, configuration. Never imports torch."""

from shared import old_names as old_names
