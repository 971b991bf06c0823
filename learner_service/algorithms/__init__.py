"""Algorithms by name: a module here is a plug-in (see learner_service.algorithms.base)."""
