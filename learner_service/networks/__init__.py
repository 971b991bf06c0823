"""Networks by name: each module but those of SUPPORT is a plug-in (see inputs.py)."""

SUPPORT = {"distributions", "inputs", "recurrent", "stacked", "toom_cook"}
