"""The configuration of a run with all options of its plug-ins, for config.yaml."""

from learner_service.algorithms.base import algorithm_config, algorithm_options
from learner_service.networks.building import FOLDER, GROUP, observed_image, resolved_name
from learner_service.storage.flight import Flight
from shared.config import ExperimentConfig, PluginConfig, validate
from shared.config_text import plain_data
from shared.registry import load_plugin
from shared.spec import EnvSpec


def completed(
    config: ExperimentConfig, spec: EnvSpec | None, flight: Flight | None = None
) -> ExperimentConfig:
    """Add all options of algorithm and network; with the spec also the network of `auto`.

    Args:
        config: experiment as it is given.
        spec: environment's spec, if it is known.
        flight: choice of the warm-up, if it is over.

    Raises:
        ConfigError: for an unknown algorithm, network or option.
    """
    options, learner = algorithm_options(config.algorithm), config.learner
    if flight is not None:
        asked = algorithm_config(config.algorithm)
        chosen = asked.with_flight(flight.unroll_steps, flight.unrolls_per_update)
        options |= plain_data(chosen)
        learner = learner.model_copy(update={"max_policy_lag": flight.max_policy_lag})
    algorithm = PluginConfig(name=config.algorithm.name, **options)
    network = completed_network(config.network, spec)
    return config.model_copy(
        update={"algorithm": algorithm, "network": network, "learner": learner}
    )


def completed_network(network: PluginConfig, spec: EnvSpec | None) -> PluginConfig:
    """Add all options of a network; of `auto` without a spec none."""
    name = network.name
    if name == "auto":
        if spec is None:
            return network
        name = resolved_name(network, observed_image(spec))
    model = load_plugin(FOLDER, GROUP, name).Config
    options = plain_data(validate(model, network.options, "network"))
    return PluginConfig(name=name, **options)
