"""Networks by name: each module is a plug-in (see learner_service/layers/building.py)."""
