"""Algorithms by name: each module but those of SUPPORT is a plug-in (see base.py)."""

from typing import Any

SUPPORT = {
    *(
        "actor",
        "actor_critic",
        "augmented",
        "averaging",
        "base",
        "coma_policy",
        "confusion",
        "counterfactual",
    ),
    *(
        "exploration",
        "frozen",
        "imitation",
        "labelled_images",
        "mappo_policy",
        "minibatches",
        "normalising",
        "off_policy",
        "on_policy",
    ),
    *(
        "options",
        "returns",
        "running_moments",
        "schedule",
        "stacking",
        "steps",
        "supervised",
        "supervised_network",
        "value_norm",
        "wrapping",
    ),
}

# Other names of what is built, as messages say them. Lower case, without "-" and "_".
KNOWN_AS: dict[str, dict[str, Any]] = {
    "dqn": {"name": "iql", "double_q": False},
    "ddqn": {"name": "iql"},
    "doubledqn": {"name": "iql"},
    "iddpg": {"name": "ddpg"},
    "itd3": {"name": "td3"},
    "isac": {"name": "sac"},
}
# Names of the literature that are not built: the nearest plug-in.
NEAREST: dict[str, dict[str, Any]] = {
    "a2c": {"name": "ippo", "data_passes": 1},
    "ia2c": {"name": "ippo", "data_passes": 1},
    "maa2c": {"name": "mappo", "data_passes": 1},
    "a3c": {"name": "ippo", "data_passes": 1},
    "impala": {"name": "ippo", "vtrace_clip": 1.0},
    "happo": {"name": "mappo", "share_parameters": False},
    "hatrpo": {"name": "mappo", "share_parameters": False},
    "mat": {"name": "mappo"},
    "qplex": {"name": "qmix"},
    "qtran": {"name": "qmix"},
    "wqmix": {"name": "qmix"},
    "maac": {"name": "masac"},
}
