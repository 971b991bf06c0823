"""Algorithms by name: each module is a plug-in (see learner_service/learning/base.py).

VARIANTS are plug-ins that differ from another one in options alone.
"""

from typing import Any

from murmur.shared.config.plugins import Variant

_OWN_OBSERVATION = {"centralized": (False, "each agent's own observation alone")}
_TD3: dict[str, Any] = {"twin_critics": True, "policy_delay": 2, "target_noise": None}
# As the papers and other libraries do.
_ONE_AGENT: dict[str, Any] = {"replay": {"update_interval": 1}, "gamma": 0.99}
# MADDPG's rates (5e-4, targets at 0.01) let the values of a single critic run away on HalfCheetah.
# The policy learns as slowly as in the paper, section 7.
_DDPG: dict[str, Any] = {**_ONE_AGENT, "actor_lr": 1e-4, "target_tau": 0.005}
# Every 4 rows, as DQN in other libraries, leaves CartPole half learned after 100,000. Exploration
# ends after a tenth of these, as there.
_DQN: dict[str, Any] = {
    "replay": {"update_interval": 2},
    "epsilon_env_steps": 10_000,
    "averaged_policy": False,
    "gamma": 0.99,
}
VARIANTS = {
    "ippo": Variant(
        "mappo",
        "IPPO: MAPPO with a value of each own observation (de Witt et al. 2020, arXiv:2011.09533).",
        fixed=_OWN_OBSERVATION,
    ),
    "ppo": Variant(
        "mappo",
        "PPO, which for several agents is IPPO (Schulman et al. 2017, arXiv:1707.06347).",
        fixed=_OWN_OBSERVATION,
    ),
    "iql": Variant(
        "qmix",
        "Independent Q-learning: each agent learns its own reward (Tan 1993); DQN for one agent.",
        fixed={"mixer": ("none", "each agent learns its own reward")},
        defaults=_DQN,
    ),
    "vdn": Variant(
        "qmix",
        "VDN: QMIX whose team value is the sum of the agents' (Sunehag et al. 2018, "
        "arXiv:1706.05296).",
        fixed={"mixer": ("vdn", "the sum of the agents' values")},
    ),
    "qplex": Variant(
        "qmix",
        "QPLEX: QMIX whose mixing network can tell any payoff (Wang et al. 2021, "
        "arXiv:2008.01062).",
        fixed={"mixer": ("qplex", "the duplex dueling network")},
        defaults={"mixer_hidden": 64},
    ),
    "ddpg": Variant(
        "maddpg",
        "DDPG for each agent by itself (Lillicrap et al. 2016, arXiv:1509.02971).",
        fixed=_OWN_OBSERVATION,
        defaults=_DDPG,
    ),
    "matd3": Variant(
        "maddpg",
        "MATD3: MADDPG with the three changes of TD3 (Ackermann et al. 2019, arXiv:1910.01465).",
        defaults=_TD3,
    ),
    "td3": Variant(
        "maddpg",
        "TD3 for each agent by itself (Fujimoto et al. 2018, arXiv:1802.09477).",
        fixed=_OWN_OBSERVATION,
        defaults={**_TD3, **_ONE_AGENT},
    ),
    "sac": Variant(
        "masac",
        "SAC for each agent by itself (Haarnoja et al. 2018, arXiv:1812.05905).",
        fixed=_OWN_OBSERVATION,
        defaults=_ONE_AGENT,
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
    "dmaq": {"name": "qplex"},
    "dmaqqatten": {"name": "qplex"},
}
# Names of the literature that are not built: the nearest plug-in.
NEAREST: dict[str, dict[str, Any]] = {
    "a2c": {"name": "ippo", "data_passes": 1},
    "ia2c": {"name": "ippo", "data_passes": 1},
    "maa2c": {"name": "mappo", "data_passes": 1},
    "a3c": {"name": "ippo", "data_passes": 1},
    "impala": {"name": "ippo", "vtrace_clip": 1.0},
    "hatrpo": {"name": "happo"},
    "mat": {"name": "mappo"},
    "qtran": {"name": "qplex"},
    "wqmix": {"name": "qplex"},
    "maac": {"name": "masac"},
}
