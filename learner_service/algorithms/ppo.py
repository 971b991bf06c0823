"""PPO, which for several agents is IPPO (Schulman et al. 2017, arXiv:1707.06347)."""

from learner_service.algorithms import ippo

Config = ippo.Config
build = ippo.build
