"""Networks by name: a module here is a plug-in (see learner_service.networks.inputs)."""
