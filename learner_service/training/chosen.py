"""The configuration of a run with what its plug-ins take where nothing is said."""

from learner_service.algorithms.base import algorithm_options
from learner_service.networks.building import FOLDER, GROUP
from shared.config import ExperimentConfig, PluginConfig, validate
from shared.registry import load_plugin
from shared.spec import EnvSpec


def completed(config: ExperimentConfig, spec: EnvSpec | None) -> ExperimentConfig:
    """All options of algorithm and network; with the spec also the network that `auto` stands for.

    Raises:
        ConfigError: for an unknown algorithm, network or option.
    """
    algorithm = PluginConfig(name=config.algorithm.name, **algorithm_options(config.algorithm))
    return config.model_copy(
        update={"algorithm": algorithm, "network": _network(config.network, spec)}
    )


def _network(network: PluginConfig, spec: EnvSpec | None) -> PluginConfig:
    name = network.name
    if name == "auto":
        if spec is None:
            return network
        images = any(o.per_agent and len(o.shape) == 3 for o in spec.observations)
        name = "cnn" if images else "mlp"
    model = load_plugin(FOLDER, GROUP, name).Config
    options = validate(model, network.options, "network").model_dump()
    return PluginConfig(name=name, **options)
