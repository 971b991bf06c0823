"""The configuration of a run with what its plug-ins take, and what was chosen, if not said."""

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
    """All options of algorithm and network; with the spec also the network that `auto` stands for.

    Args:
        config: as given.
        spec: the environment's, if it is known.
        flight: what the warm-up chose, if it is over.

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
    network = _network(config.network, spec)
    return config.model_copy(
        update={"algorithm": algorithm, "network": network, "learner": learner}
    )


def _network(network: PluginConfig, spec: EnvSpec | None) -> PluginConfig:
    name = network.name
    if name == "auto":
        if spec is None:
            return network
        name = resolved_name(network, observed_image(spec))
    model = load_plugin(FOLDER, GROUP, name).Config
    options = plain_data(validate(model, network.options, "network"))
    return PluginConfig(name=name, **options)
