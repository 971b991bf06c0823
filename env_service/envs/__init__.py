"""Environments by name: a module here is a plug-in (see env_service.environment)."""
