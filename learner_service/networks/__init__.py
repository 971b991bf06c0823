"""Networks by name: each module but those of SUPPORT is a plug-in (see building.py)."""

SUPPORT = {
    "building",
    "distributions",
    "forward",
    "gru",
    "inputs",
    "maps",
    "recurrent",
    "snapshot",
    "stacked",
    "toom_cook",
}
