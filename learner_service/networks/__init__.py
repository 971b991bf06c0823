"""Networks by name: each module but those of SUPPORT is a plug-in (see building.py)."""

SUPPORT = {
    "building",
    "casting",
    "dense",
    "derived",
    "distributions",
    "dropout",
    "encoded",
    "footprint",
    "forward",
    "gru",
    "images",
    "inputs",
    "layers",
    "maps",
    "recurrent",
    "resizing",
    "snapshot",
    "stacked",
    "toom_cook",
}
