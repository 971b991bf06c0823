"""Sources of images by name: a module here is a plug-in (see murmur.env_service.sources.source)."""

# Modules of this folder that are no sources.
SUPPORT = {"changes", "decode", "size", "source"}
