"""Sources of images by name: a module here is a plug-in (see env_service.sources.source)."""

SUPPORT = {"decode", "size", "source"}  # modules of this folder that are no sources
