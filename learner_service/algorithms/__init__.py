"""Algorithms by name: each module but those of SUPPORT is a plug-in (see base.py)."""

from typing import Any

SUPPORT = {
    *("actor", "augmented", "averaging", "base", "coma_policy", "confusion", "counterfactual"),
    *("dense_losses", "exploration", "frozen", "mappo_policy", "minibatches", "off_policy"),
    *("options", "returns", "schedule", "stacking", "supervised", "value_norm"),
}

# Names of the literature that are a plug-in here with some of its options set. Lower case, without
# "-" and "_". The single-agent forms are the independent ones: each agent learns for itself.
KNOWN_AS: dict[str, dict[str, Any]] = {
    "vdn": {"name": "qmix", "mixer": "vdn"},
    "iql": {"name": "qmix", "mixer": "none"},
    "dqn": {"name": "qmix", "mixer": "none"},
    "ddqn": {"name": "qmix", "mixer": "none"},
    "ippo": {"name": "mappo", "centralised": False},
    "ppo": {"name": "mappo", "centralised": False},
    "ddpg": {"name": "maddpg", "centralised": False},
    "iddpg": {"name": "maddpg", "centralised": False},
    "matd3": {"name": "maddpg", "twin_critics": True, "policy_delay": 2, "target_noise": 0.2},
    "td3": {
        **{"name": "maddpg", "centralised": False},
        **{"twin_critics": True, "policy_delay": 2, "target_noise": 0.2},
    },
    "sac": {"name": "masac", "centralised": False},
    "isac": {"name": "masac", "centralised": False},
}
# Names of the literature that are not built: the nearest plug-in.
NEAREST: dict[str, dict[str, Any]] = {
    "a2c": {"name": "mappo", "centralised": False, "data_passes": 1},
    "ia2c": {"name": "mappo", "centralised": False, "data_passes": 1},
    "maa2c": {"name": "mappo", "data_passes": 1},
    "a3c": {"name": "mappo", "centralised": False, "data_passes": 1},
    "impala": {"name": "mappo", "centralised": False},
    "happo": {"name": "mappo", "share_parameters": False},
    "hatrpo": {"name": "mappo", "share_parameters": False},
    "mat": {"name": "mappo"},
    "qplex": {"name": "qmix"},
    "qtran": {"name": "qmix"},
    "wqmix": {"name": "qmix"},
    "maac": {"name": "masac"},
}
