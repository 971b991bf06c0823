"""A trained policy for another number of agents, where nothing that it is fed depends on theirs.

Agents that share one network are rows of it: the policy's weights are those of the checkpoint, and
what only learning needs, such as critics, is untrained and not used.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from murmur.learner_service.checkpoint.contents import buildable_config, saved_spec, spec_text
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import observed_image, resolve_network
from murmur.learner_service.learning.base import algorithm_config, build_algorithm
from murmur.learner_service.learning.options import SharingConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import CheckpointError, ConfigError, SpecError
from murmur.shared.wire.spec import (
    ADJACENCY,
    ArraySpec,
    Composite,
    EnvSpec,
    first_difference,
    without_expert,
)

_CPU = torch.device("cpu")
_MIXER = "mixer."  # prefix of a mixing network's weights: it learns, and never acts


def resized_spec(spec: EnvSpec, num_agents: int) -> EnvSpec:
    """Return what a policy observes in the same environment with another number of agents.

    What agents share, such as a `state`, is left out: only critics see it.

    Args:
        spec: spec of the environment that the policy was trained in.
        num_agents: number of agents.
    """
    spec = without_expert(spec)
    own = [o for o in spec.observations if o.per_agent]
    if spec.gives_adjacency:
        own = [replace(o, shape=(num_agents,)) if o.name == ADJACENCY else o for o in own]
    derived = tuple(d for d in spec.derived if spec.derived_array(d).per_agent)
    return replace(
        spec,
        num_agents=num_agents,
        observations=tuple(own),
        derived=derived,
        symmetries=(),
        agents=(),
    )


def resize_checkpoint(state: Mapping[str, Any], name: str, spec: EnvSpec) -> dict[str, Any]:
    """Return a checkpoint with the policy of another one, for an environment of other agents.

    Args:
        state: contents of the checkpoint.
        name: checkpoint's name, for messages.
        spec: spec of the environment to act in.

    Raises:
        MurmurError: if the policy depends on the number of agents, or on something else that
            differs; naming it.
    """
    saved, config = saved_spec(state), buildable_config(state, name)
    whose = (
        f"checkpoint {name} is of {saved.num_agents} agents and cannot act for {spec.num_agents}"
    )
    if reason := _refusal(config, saved, spec):
        raise CheckpointError(f"{whose}: {reason}")
    algorithm = build_algorithm(
        config.algorithm, spec, config.network, Precision("fp32", _CPU), _CPU, config.run.seed
    )
    for key in (*algorithm.acting_parts, *algorithm.transforms.state()):
        part = algorithm.parts[key]
        untrained = {n: x for n, x in part.state_dict().items() if str(n).startswith(_MIXER)}
        try:
            part.load_state_dict({**state["algorithm"]["parts"][key], **untrained})
        except (KeyError, RuntimeError) as error:
            reason = str(error).strip().rpartition("\n")[2].strip()
            raise CheckpointError(
                f"{whose}: what its network is fed depends on their number ({reason}); train "
                "with observations that do not, such as sets of entities for network attention "
                "or neighbors for network graph"
            ) from None
    return {**state, "spec": spec_text(spec), "algorithm": algorithm.state_dict()}


def _refusal(config: ExperimentConfig, saved: EnvSpec, spec: EnvSpec) -> str:
    """Return why weights of one spec mean nothing in the other; empty if they do."""
    options = algorithm_config(config.algorithm)
    if not isinstance(options, SharingConfig) or options.share_parameters is not True:
        return "its agents do not all share one network; train with algorithm.share_parameters=true"
    if getattr(options, "teams", None):
        return "algorithm.teams trains its teams apart; train without, by one shared network"
    if config.league.on:
        return "a league's policy acts for one team of a fixed number"
    if isinstance(saved.action, Composite) and (saved.action.idle or spec.action != saved.action):
        return "its agents take actions of different kinds"
    if resolve_network(config.network, observed_image(saved)).inputs.agent_id:
        return "network.agent_id=true feeds each agent's number; train with false"
    here, there = (_as_seen(s, spec.num_agents) for s in (saved, spec))
    return first_difference(here, there) or ""


def _as_seen(spec: EnvSpec, num_agents: int) -> EnvSpec:
    """Return a spec in which what does not matter to a policy for any number of agents is equal.

    The number of entities in a set does not matter to a network that is not told it. If a network
    flattens the set, its weights do not fit.
    """
    spec = resized_spec(spec, num_agents)
    sets = {o.name for o in spec.observations if len(o.shape) == 2}
    masks = {f"{name}_mask" for name in sets}

    def seen(o: ArraySpec) -> ArraySpec:
        if o.name in sets:
            return replace(o, shape=(1, *o.shape[1:]))
        return replace(o, shape=(1,)) if o.name in masks and len(o.shape) == 1 else o

    return replace(
        spec, observations=tuple(map(seen, spec.observations)), metrics=(), max_episode_steps=0
    )


def with_agents(state: Mapping[str, Any], name: str, num_agents: int) -> dict[str, Any]:
    """Return a checkpoint of a policy for this number of agents; see resize_checkpoint.

    Args:
        state: contents of the checkpoint.
        name: checkpoint's name, for messages.
        num_agents: number of agents; 0: as trained.

    Raises:
        MurmurError: if it is negative, or the policy depends on the number.
    """
    saved = saved_spec(state)
    if num_agents < 0:
        raise ConfigError(f"num_agents = {num_agents}; give the number of agents, or leave it out")
    if num_agents in (0, saved.num_agents):
        return dict(state)
    try:
        spec = resized_spec(saved, num_agents)
    except SpecError as error:
        raise CheckpointError(
            f"checkpoint {name} cannot act for {num_agents} agents: {error}"
        ) from None
    return resize_checkpoint(state, name, spec)
