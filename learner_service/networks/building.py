"""Networks by name, and what goes into them, derived from the run's EnvSpec.

A network plug-in is a module `learner_service/networks/<name>.py` that has

    Config                                     a frozen pydantic model
    build(config, shape, num_outputs, slices)  -> nn.Module

The module maps (image, vector) to [R, num_outputs]. Rows have the agent innermost; `slices` says
which set of weights each agent uses (see learner_service.networks.stacked). It may have a method
twice(image, vector, change), which saves work where rows are valued for two actions: see
`forward_agents_twice`, which does without, too. With the option
`recurrent` in its Config a network of any kind is given a GRU
(see learner_service.networks.recurrent).

`auto` is `cnn` if the environment observes images ([C, H, W] arrays), else `mlp`.
"""

from types import ModuleType
from typing import Any

from torch import nn

from learner_service.networks.inputs import InputOptions, InputShape
from learner_service.networks.recurrent import Recurrent
from shared.config import PluginConfig, validate
from shared.errors import ConfigError
from shared.registry import load_plugin
from shared.spec import EnvSpec

FOLDER, GROUP = "learner_service.networks", "murmur.networks"


def _plugin(config: PluginConfig, images: bool) -> tuple[ModuleType, Any]:
    """The network's module and its checked options."""
    name = config.name
    if name == "auto":
        name = "cnn" if images else "mlp"
    module = load_plugin(FOLDER, GROUP, name)
    return module, validate(module.Config, config.options, "network")


def input_options(config: PluginConfig, spec: EnvSpec) -> InputOptions:
    """What the configured network wants to be fed.

    Raises:
        ConfigError: for an unknown network or option.
    """
    _, options = _plugin(config, any(o.per_agent and len(o.shape) == 3 for o in spec.observations))
    return InputOptions(
        options.agent_id,
        getattr(options, "centred", ()),
        getattr(options, "centred_state", ()),
    )


def build_network(
    config: PluginConfig,
    shape: InputShape,
    num_outputs: int,
    slices: tuple[int, ...] = (0,),
    *,
    may_remember: bool = False,
) -> nn.Module:
    """The configured network for these inputs, a `Recurrent` one if so configured.

    Args:
        config: name and options.
        shape: what it is fed.
        num_outputs: outputs of a row.
        slices: the slice of each agent, as `resolve_sharing` gives it; (0,): one for all.
        may_remember: whether the algorithm can work with recurrent networks.

    Raises:
        ConfigError: for an unknown network or option, or one that the algorithm cannot work with.
    """
    module, options = _plugin(config, shape.image is not None)
    width: int = getattr(options, "recurrent", 0)
    if width and not may_remember:
        raise ConfigError(
            f"network.recurrent = {width}, but this algorithm has no use for memory; set it to 0, "
            "or use algorithm 'coma' or 'mappo'"
        )
    network: nn.Module = module.build(options, shape, width or num_outputs, slices)
    return Recurrent(network, slices, width, num_outputs) if width else network
