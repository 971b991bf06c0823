"""Algorithms by name: each module but those of SUPPORT is a plug-in (see base.py)."""

SUPPORT = {"base", "off_policy", "returns"}
