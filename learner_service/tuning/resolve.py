"""The configuration of a run, resolved: with what its plug-ins take, and what was chosen for it."""

from learner_service.layers.building import observed_image, resolve_network
from learner_service.layers.dense import dense_plugin
from learner_service.learning.base import algorithm_config, with_options
from learner_service.learning.supervised import is_supervised, wrong_algorithm
from learner_service.storage.flight import Flight
from shared.config.experiment import ExperimentConfig
from shared.config.plugins import resolve_plugin
from shared.wire.samples import SampleSpec
from shared.wire.spec import EnvSpec


def resolve(
    config: ExperimentConfig,
    spec: EnvSpec | SampleSpec | None = None,
    flight: Flight | None = None,
) -> ExperimentConfig:
    """Complete the configuration with all options of algorithm and network.

    Args:
        config: configuration as given, or resolved before.
        spec: spec of the environment or source, by which `auto` stands for a network; None: not
            known yet, `auto` stays.
        flight: unrolls and policy lag that the warm-up chose; None: it has not.

    Raises:
        ConfigError: for an unknown algorithm, network or option, or an algorithm that does not
            learn from what the run has.
    """
    algorithm, network = resolve_plugin("algorithm", config.algorithm), config.network
    if is_supervised(algorithm.module) != config.supervised:
        raise wrong_algorithm(config)
    if network.name == "auto" and spec is None:
        pass
    elif config.supervised:
        network = dense_plugin(network).config
    else:
        image = observed_image(spec) if isinstance(spec, EnvSpec) else None
        network = resolve_network(network, image).config
    config = config.changed({"algorithm": algorithm.config, "network": network})
    if flight is None:
        return config
    asked = algorithm_config(config.algorithm)
    chosen = flight.unroll_steps, flight.unrolls_per_update
    asked = asked.changed(dict(zip(asked.about.flight, chosen, strict=False)))
    return with_options(config, asked).changed({"learner.max_policy_lag": flight.max_policy_lag})
