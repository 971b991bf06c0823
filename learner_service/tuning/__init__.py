"""Options that the configuration leaves open: chosen for the device, the spec and the ranks."""
