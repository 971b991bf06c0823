"""Tools for own environments, networks and algorithms: checks, skeletons, certificates."""
