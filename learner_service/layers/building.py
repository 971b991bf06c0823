"""Networks by name: plug-ins, checked and built for what an algorithm needs of them.

A network plug-in is a module `learner_service/networks/<name>.py`, or of another package by an
entry point in the group `murmur.networks`. It has

    Config                                     a frozen pydantic model of its options
    build(config, shape, num_outputs, slices)  -> nn.Module

`package.module:Name` names an nn.Module class that is a plug-in by itself: see
murmur.shared.config.named_plugin.

The module's `forward(image, vector)` maps [B, A, C, H, W] and [B, A, F], either of which is None
where `shape` has none, to [B, A, num_outputs]. B may differ from call to call; B are joint rows, A
the agents of each. What it does between agents is its own affair, and A is len(slices). It keeps
nothing from one call to the next.

No option is needed. These have a meaning if a Config declares them: `agent_id` (bool: append the
agent's number, one-hot), `normalize_observations` (bool: bring observations that are no images to
mean 0 and variance 1, see murmur.learner_service.preprocess.normalize), `recurrent` (int: a
recurrent unit of that width follows, see murmur.learner_service.layers.recurrent) and
`recurrent_cell` (str: its kind, "gru" or "lstm"), `frame_stack` (int: number of steps whose
channels the image holds, oldest first), `centered` and `centered_state` (see InputOptions).

A network whose module says

    STACKED = True

promises to keep agents apart: an agent's output comes from its own row and its own parameter group
alone, and `slices` names the parameter group of each agent (see
murmur.learner_service.layers.stacked). In return agents may have weights of their own, and rows may
be grouped otherwise: the second dimension is then any multiple of len(slices), or anything if there
is one parameter group, and the slices repeat along it. Without that promise all agents share one
parameter group, and critics that must not see another agent's inputs are fed each agent's row
alone, with A = 1.

A Config with an attribute `communicates` (bool) says whether agents hear each other. If it is true
and some agents may be absent, `agent_mask` is the last of `shape.arrays`: above 0 for an agent that
is there. An absent agent must send and get nothing.

It may have a method twice(image, vector, change), which saves work where rows are valued for two
actions: see `forward_twice`, which does without, too.

`auto` is `mlp` if the environment observes no images ([C, H, W] arrays), `cnn` if they are small
maps, and `nature` from 36 pixels a side.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from murmur.learner_service.device.memory import learning, learning_from, require_room
from murmur.learner_service.layers.dense import is_dense, require_numbers, tried
from murmur.learner_service.layers.encoded import Encoded, Encoder
from murmur.learner_service.layers.footprint import footprint
from murmur.learner_service.layers.forward import Alone, Twins
from murmur.learner_service.layers.inputs import InputOptions, InputShape
from murmur.learner_service.layers.recurrent import CELLS, CellKind, Recurrent
from murmur.learner_service.layers.stacked import (
    MLP,
    LayersConfig,
    count_slices,
    initialize,
    linear_layers,
)
from murmur.shared.config import PluginConfig
from murmur.shared.config.plugins import Plugin, plugin_failures, resolve_plugin
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import STATE, EnvSpec

_LEAST_NATURE = 36  # pixels a side; below, its three layers leave nothing
# Numbers that a network is fed, in one row and in a whole pass, from which it is weighed.
_LARGE_INPUT, _LARGE_PASS = 4096, 1 << 20
NORMALISE = "network.normalize_observations"
# Options with a meaning of their own: what every network is fed, and what it remembers.
RESERVED = {
    "agent_id": bool,
    "recurrent": int,
    "recurrent_cell": str,
    "frame_stack": int,
    "normalize_observations": bool,
    "centered": tuple,
    "centered_state": tuple,
}


ImageShape = tuple[int, ...] | None  # (C, H, W); None: nothing of three dimensions is observed


def resolved_name(config: PluginConfig, image: ImageShape) -> str:
    """The network's name; what `auto` stands for where agents observe such images."""
    if config.name != "auto":
        return config.name
    if image is None:
        return "mlp"
    return "nature" if min(image[1:]) >= _LEAST_NATURE else "cnn"


def observed_image(spec: EnvSpec) -> ImageShape:
    """The shape of the first image that each agent observes."""
    arrays = [*map(spec.derived_array, spec.derived), *spec.observations]
    seen = (a for a in arrays if a.per_agent and a.name != STATE)  # a state is critics' alone
    return next((a.shape for a in seen if len(a.shape) == 3), None)


@dataclass(frozen=True)
class Network(Plugin):
    """The configured network for images of one shape; its name is never "auto".

    Attributes:
        inputs: properties of its inputs.
        frame_stack: number of images of the last steps that it sees at once.
        normalizes: whether its observations are normalized.
        recurrent: width of its recurrent unit; 0: none.
        recurrent_cell: kind of its recurrent unit.
        stacked: whether it keeps agents apart and may have a parameter group for each.
        mixes: whether an agent's output may depend on what other agents observe.
    """

    inputs: InputOptions
    frame_stack: int
    normalizes: bool
    recurrent: int
    recurrent_cell: CellKind
    stacked: bool
    mixes: bool


def resolve_network(config: PluginConfig, image: ImageShape) -> Network:
    """Load the configured network and check its options.

    Args:
        config: name and options; "auto" stands for a network that suits the images.
        image: shape of the images.

    Raises:
        ConfigError: for an unknown network or option.
    """
    name = resolved_name(config, image)
    plugin = resolve_plugin("network", PluginConfig(name=name, **config.options))
    if is_dense(plugin.module):
        raise ConfigError(
            f"network '{name}' maps an image to logits for each pixel, for algorithm "
            "'segmentation'; a policy needs one of observations: use 'auto', 'mlp' or 'cnn'"
        )
    options = plugin.options
    if image is not None and hasattr(options, "for_image"):
        options = options.for_image(image)
    given = {option: getattr(options, option, kind()) for option, kind in RESERVED.items()}
    for option, kind in RESERVED.items():
        if not isinstance(given[option], kind):
            raise ConfigError(
                f"network '{name}' has an option {option} = {given[option]!r}; the name is "
                f"reserved for a {kind.__name__}: see docs/your-network.md, or rename the option"
            )
    cell = given["recurrent_cell"] or "gru"
    if cell not in CELLS:
        raise ConfigError(f"network.recurrent_cell = {cell!r}; set {' or '.join(CELLS)}")
    if cell != "gru" and not given["recurrent"]:
        raise ConfigError(
            f"network.recurrent_cell={cell} has no effect with network.recurrent=0; set "
            "network.recurrent to the unit's width, such as 64"
        )
    stacked = bool(getattr(plugin.module, "STACKED", False))
    hears = getattr(options, "communicates", None)
    inputs = InputOptions(
        given["agent_id"], given["centered"], given["centered_state"], alive=hears is True
    )
    return Network(
        *("network", name, plugin.module, options),
        inputs,
        given["frame_stack"] if hasattr(options, "frame_stack") else 1,
        given["normalize_observations"],
        given["recurrent"],
        cell,
        stacked,
        mixes=hears if isinstance(hears, bool) else not stacked,
    )


def input_options(config: PluginConfig, spec: EnvSpec) -> InputOptions:
    """Return properties of the configured network's inputs.

    Raises:
        ConfigError: for an unknown network or option.
    """
    return resolve_network(config, observed_image(spec)).inputs


def build_network(
    config: PluginConfig | Network,
    shape: InputShape,
    num_outputs: int,
    slices: tuple[int, ...] = (0,),
    *,
    may_remember: bool = False,
    apart: bool = False,
    encoder: Encoder | None = None,
    trains: bool = True,
) -> nn.Module:
    """The configured network for these inputs, a `Recurrent` one if so configured.

    Args:
        config: name and options, or the network that `resolve_network` made of them.
        shape: shape of the network's inputs.
        num_outputs: outputs for an agent.
        slices: the slice of each agent, as `resolve_sharing` gives it; (0,): one for all.
        may_remember: whether the algorithm can work with recurrent networks.
        apart: whether an agent's output must come from that agent's inputs alone.
        encoder: encoder of `shared_encoder`; the network is then linear layers over its output.
        trains: whether its gradients reach the encoder.

    Raises:
        ConfigError: for an unknown network or option, or one that the algorithm cannot work with.
    """
    net = config if isinstance(config, Network) else resolve_network(config, shape.image)
    groups = 1 if net.stacked else count_slices(slices)
    _require_use(net.name, net.recurrent, may_remember, groups)
    network = _body(net, shape, num_outputs, slices, apart=apart, encoder=encoder, trains=trains)
    return _recurrent(network, slices, num_outputs, net) if net.recurrent else network


def _body(
    net: Network,
    shape: InputShape,
    num_outputs: int,
    slices: tuple[int, ...],
    *,
    apart: bool,
    encoder: Encoder | None = None,
    trains: bool = True,
) -> nn.Module:
    """Build all of a network but its recurrent unit; arguments are those of `build_network`."""
    name, options = net.name, net.options
    if net.recurrent:  # its outputs feed the recurrent unit
        num_outputs = net.recurrent
        if isinstance(options, LayersConfig):
            options = options.model_copy(update={"output_gain": 1.0})
    if encoder is not None:
        widths = [encoder.features + shape.vector, *options.hidden, num_outputs]
        return Encoded(encoder, MLP(linear_layers(widths, slices, options), slices), trains)
    alone = apart and net.mixes
    seen = (0,) if alone else slices
    with plugin_failures(f"network '{name}'"):
        make = partial(net.module.build, options, shape, num_outputs, seen)
        _require_room(make, name, shape, len(seen))
        network: nn.Module = make()
        if not net.own:
            _check(network, name, shape, len(seen), num_outputs)
    return Alone(network) if alone else network


def _require_use(name: str, width: int, may_remember: bool, groups: int) -> None:
    """Refuse memory that the algorithm has no use for, and parameter groups that do not exist.

    Args:
        name: network's name.
        width: width of its recurrent state; 0: none.
        may_remember: whether the algorithm can work with recurrent networks.
        groups: parameter groups that are wanted of a network that has one.

    Raises:
        ConfigError: naming the fix.
    """
    if width and not may_remember:
        raise ConfigError(
            f"network.recurrent = {width}, but this algorithm learns without memory; set it to 0, "
            "or use one of murmur's own algorithms, which all learn with it"
        )
    if groups > 1:
        raise ConfigError(
            f"network '{name}' has one parameter group for all agents, {groups} are "
            "wanted; let all agents share their parameters (algorithm.share_parameters: true), or "
            "use a network that declares STACKED, such as mlp or cnn"
        )


def _recurrent(
    body: nn.Module, slices: tuple[int, ...], num_outputs: int, net: Network
) -> Recurrent:
    """A recurrent unit and the outputs after a network; the outputs' weights as its options say."""
    network = Recurrent(body, slices, net.recurrent, num_outputs, net.recurrent_cell)
    if isinstance(net.options, LayersConfig):
        initialize(network.head, net.options.initialization, net.options.output_gain)
    return network


def shared_encoder(
    net: Network,
    actor: InputShape,
    critic: InputShape,
    slices: tuple[int, ...],
    option: str = "a shared encoder",
) -> Encoder:
    """The configured network's convolutions, for actor and critic.

    Args:
        net: the actor's network.
        actor: shape of the actor's inputs.
        critic: shape of the critic's inputs.
        slices: the slice of each agent.
        option: name of the option that asks for the encoder, for the message.

    Raises:
        ConfigError: if there are none, or the two are fed different images.
    """
    problem = ""
    if actor.image is None:
        problem = "the environment observes no images"
    elif actor.image != critic.image:
        problem = (
            f"the critic sees maps of the state, too: images {critic.image}, the actor's are "
            f"{actor.image}"
        )
    elif not hasattr(net.module, "convolve"):
        problem = f"network '{net.name}' has no convolutions apart; use cnn, nature or impala"
    if problem:
        raise ConfigError(f"{option} = true: {problem}; set it to false")
    with plugin_failures(f"network '{net.name}'"):
        make = partial(net.module.build, net.options, InputShape(actor.image, 0), 1, slices)
        _require_room(make, net.name, InputShape(actor.image, 0), len(slices))
        return Encoder(*net.module.convolve(net.options, actor.image, slices))


def build_twins(
    net: Network,
    shape: InputShape,
    num_outputs: int,
    slices: tuple[int, ...],
    twins: tuple[int, ...],
    num_twins: int,
    encoder: Encoder | None = None,
    *,
    may_remember: bool = False,
) -> nn.Module:
    """Build networks side by side: one stack with the attribute `twins`, or a `Twins` module.

    Where they remember, recurrent units are one stack in any case.

    Args:
        net: the network that each of them is.
        shape: shape of the networks' inputs.
        num_outputs: outputs of one of them for an agent.
        slices: the slice of each agent.
        twins: slices of a stack of them.
        num_twins: networks of each agent.
        encoder: encoder of `shared_encoder`; see `build_network`.
        may_remember: whether the algorithm can work with recurrent networks.

    Raises:
        ConfigError: see `build_network`.
    """
    if net.stacked:
        # In a stack each agent's row is fed to all of its networks.
        rows, device, itemsize = learning()
        with learning_from(num_twins * rows, device, itemsize):
            stack = build_network(
                net, shape, num_outputs, twins, may_remember=may_remember, encoder=encoder
            )
        cast(Any, stack).twins = num_twins
        return stack
    _require_use(net.name, net.recurrent, may_remember, count_slices(slices))
    each = Twins([_body(net, shape, num_outputs, slices, apart=True) for _ in range(num_twins)])
    if not net.recurrent:
        return each
    remembers = _recurrent(each, twins, num_outputs, net)
    cast(Any, remembers).twins = num_twins
    return remembers


def weight_slices(network: nn.Module, num_slices: int) -> int:
    """Count the gradients clipped apart: the stack's slices, or 1 for the network as a whole.

    An encoder belongs to all of an agent's twins.
    """
    body = network.body if isinstance(network, Recurrent) else network
    return 1 if isinstance(body, Twins | Encoded) else num_slices


def _require_room(
    build: Callable[[], nn.Module], name: str, shape: InputShape, agents: int
) -> None:
    """Measure a network without memory; a plug-in's may not allow that.

    Args:
        build: makes the network.
        name: network's name.
        shape: shape of the network's inputs.
        agents: number of agents of a joint row.

    Raises:
        SpecError: if it does not fit.
    """
    rows, device, itemsize = learning()
    fed = max(math.prod(shape.image or ()), shape.vector)
    if fed < _LARGE_INPUT and fed * rows < _LARGE_PASS:
        return
    image = None if shape.image is None else (agents, *shape.image)
    found = footprint(build, agents, image, (agents, shape.vector) if shape.vector else None)
    if found is None:
        return
    require_room(
        found.learning_bytes(rows, itemsize),
        f"network '{name}' for images {shape.image} and vectors {shape.vector} has "
        f"{found.weights:.3g} weights, which with gradients and moments"
        + f" and a pass over {rows} agents' rows"
        * bool(rows),
        "shrink the images (environment.resize), lower the algorithm's batch_size, or use a "
        "smaller network",
        device,
    )


@torch.no_grad()
def _check(network: nn.Module, name: str, shape: InputShape, agents: int, num_outputs: int) -> None:
    """Try a plug-in's network on random inputs.

    Raises:
        ConfigError: if it does not give what the contract says.
    """

    def synthetic(rows: int) -> tuple[Tensor | None, Tensor | None]:
        image = None if shape.image is None else torch.rand(rows, agents, *shape.image)
        return image, torch.rand(rows, agents, shape.vector) if shape.vector else None

    with tried(network, name):
        some, others = synthetic(2), synthetic(3)
        first, between, again = network(*some), network(*others), network(*some)
    for out, rows in ((first, 2), (between, 3)):
        inputs = f"inputs of {rows} joint rows and {agents} agents"
        require_numbers(out, (rows, agents, num_outputs), name, inputs)
    # Not bit for bit: a kernel may sum in another order where memory is aligned otherwise.
    if not torch.allclose(first, again, atol=1e-5):
        raise ConfigError(
            f"network '{name}' gives two results for one input: it must keep nothing between "
            "calls; for a recurrent state declare the option `recurrent`"
        )
