"""Networks by name: each module is a plug-in (see learner_service/layers/building.py)."""

from typing import Any

# Other names of what is built, as messages say them. Lower case, without "-" and "_".
KNOWN_AS: dict[str, dict[str, Any]] = {
    "gru": {"name": "mlp", "recurrent": 64},
    "lstm": {"name": "mlp", "recurrent": 64, "recurrent_cell": "lstm"},
    "rnn": {"name": "mlp", "recurrent": 64},
    "gnn": {"name": "graph"},
}
# Names of the literature that are not built: the nearest plug-in.
NEAREST: dict[str, dict[str, Any]] = {
    "gat": {"name": "graph"},
    "gcn": {"name": "graph", "aggregate": "mean"},
    "transformer": {"name": "attention"},
    "deepsets": {"name": "attention"},
}
