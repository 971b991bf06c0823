"""Networks by name: each module but those of SUPPORT is a plug-in (see building.py)."""

SUPPORT = {
    "building",
    "distributions",
    "forward",
    "inputs",
    "maps",
    "recurrent",
    "stacked",
    "toom_cook",
}
