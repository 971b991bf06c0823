"""Environments by name: a module here is a plug-in (see murmur.env_service.environment)."""
