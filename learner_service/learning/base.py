"""The contract of an algorithm.

An algorithm plug-in is a module `learner_service/algorithms/<name>.py` that has

    Config                                                    a frozen pydantic model
    build(config, spec, network, precision, device, seed)  -> Algorithm

`package.module:Name` names a subclass of Algorithm that is a plug-in by itself: see
murmur.shared.config.named_plugin.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from murmur.learner_service.device.adam import Adam
from murmur.learner_service.device.cuda_graph import Captured, Graphs, Outputs
from murmur.learner_service.device.device import restore_generator
from murmur.learner_service.device.memory import learning_from
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import observed_image, resolve_network
from murmur.learner_service.learning.options import (
    About,
    OnPolicyConfig,
    SharingConfig,
    TeamsConfig,
)
from murmur.learner_service.learning.options import AlgorithmConfig as AlgorithmConfig
from murmur.learner_service.learning.team_specs import (
    View,
    agents_of_teams,
    network_of_team,
    shared_within,
)
from murmur.learner_service.preprocess.building import build_transforms
from murmur.learner_service.preprocess.frozen import learning_agents
from murmur.learner_service.preprocess.transform import Transforms
from murmur.learner_service.storage.frames import Frames
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.learner_service.storage.storage import Batch, UnrollStorage
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import AugmentConfig, ExperimentConfig, ImitationConfig
from murmur.shared.config.plugins import Plugin, plugin_failures, resolve_plugin
from murmur.shared.config.text import plain_data
from murmur.shared.process.errors import ConfigError, SpecError
from murmur.shared.wire.spec import (
    EXPERT_ACTION,
    MOST_JOINT_ACTIONS,
    ActionSpec,
    Composite,
    Continuous,
    Discrete,
    EnvSpec,
    action_bounds,
    with_expert,
)

B = TypeVar("B", bound=Batch)
_SCALER = "scaler"
_SEVERAL = "use mappo, happo, ippo or ppo"  # which take actions of several parts, with any bounds
_SEEDS_APART = 1009  # between teams; an algorithm draws by a few seeds from its own on
# Of an optimiser: the configuration's and the device's, not the state's.
_HOW_IT_STEPS = ("lr", "fused", "foreach", "capturable")
_HOW_IT_SCALES = ("growth_factor", "backoff_factor", "growth_interval")  # of a loss scaler, as well


class Stateful(Protocol):
    """A network, an optimiser, a loss scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:  # noqa: ANN401 - torch's own
        """Take it back."""


class Policy(ABC):
    """A snapshot of what an algorithm has learned, to act with. Used by the inference thread.

    Attributes:
        memory_size: Z, numbers that each agent carries from row to row of an episode; 0: none.
    """

    memory_size: int = 0

    @abstractmethod
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Actions for rows of observations.

        Args:
            observation: name -> [B, A, ...] (or [B, ...]) in wire dtype, on the device.
            generator: random generator of exploration; None: act greedily.
            memory: recurrent state [B, A, Z] float32 if memory_size is not 0: the last row's
                "memory" from `act`, zero where an episode begins.

        Returns:
            "action": [B, A] int32 or [B, A, U] float32, as it goes to the environment, on the
            device; the algorithm's `extras` by name; "memory" if memory_size is not 0; and if
            greedy, what the action was chosen by: "logits" [B, A, K] or "mean" [B, A, U], if there
            is such (see export).
        """


class TransformedPolicy(Policy):
    """A policy that is given what the environment sends, around one of what is learned from.

    Its memory is that of the policy inside, then that of the transforms.
    """

    def __init__(self, inner: Policy, transforms: Transforms) -> None:
        """Keep both.

        Args:
            inner: policy for transformed observations.
            transforms: snapshot of the algorithm's, which no update changes.
        """
        self.inner, self.transforms = inner, transforms
        self.memory_size = inner.memory_size + transforms.memory_size
        # Exports look for weights among the attributes.
        modules = {k: part for k, part in vars(inner).items() if isinstance(part, nn.Module)}
        for name, part in (modules | transforms.state()).items():
            setattr(self, name, part)

    @torch.inference_mode()
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Act on transformed observations; arguments and result are those of Policy."""
        own = self.inner.memory_size
        of_transforms = None if memory is None else memory[..., own:]
        seen, kept = self.transforms.act(observation, of_transforms)
        if kept is None:
            return self.inner.act(seen, generator, memory)
        remembered = kept.new_zeros((*kept.shape[:2], own)) if memory is None else memory[..., :own]
        acted = self.inner.act(seen, generator, remembered if own else None)
        acted["memory"] = torch.cat([acted["memory"], kept], -1) if own else kept
        return acted


class Algorithm(ABC, Generic[B]):
    """Learns from batches. Used by the thread that learns, but for the policies it hands out.

    Attributes:
        IMITATES: whether it learns from what an expert would have done, see `imitation`.
        TAKES_TURNS: whether it learns from an agent's turns alone, see `Transitions.waits`.
        graphs: CUDA graphs of its updates; the caller sets `graphs.enabled`.
        unroll_length: L, transitions of one unroll; 0: the storage chooses it.
        unrolls_per_update: unrolls that an update takes, at least; 0: the storage chooses.
        rows_per_update: agent-transitions an update learns from, at least.
        extras: outputs of a policy's `act` to keep with the row, beside the action: name -> shape
            per agent, float32.
        transforms: changes of batches before `update`, and of what `snapshot` acts on.
        memory_size: memory size of its own policies; the storage keeps the recurrent state with
            which each unroll's first row was acted on.
        frames: images that are stacked, if any; its storage keeps single frames.
    """

    IMITATES = False
    TAKES_TURNS = False
    unroll_length: int
    rows_per_update: int
    unrolls_per_update: int = 0
    extras: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    memory_size: int = 0
    transforms = Transforms()
    frames: Frames | None = None

    def __init__(self, precision: Precision, device: torch.device, seed: int) -> None:
        """Keep what every algorithm has, and what of it a checkpoint must hold.

        Subclasses `keep` their networks and optimisers, and add their counters to `_counts`.
        """
        self._precision = precision
        self._device = device
        self._group = precision.group
        self.graphs = Graphs(device, group=self._group)
        self._generator = torch.Generator(device).manual_seed(self._group.own_seed(seed + 1))
        self._parts: dict[str, Stateful] = {_SCALER: precision.scaler}
        self._counts: dict[str, float] = {}

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """Networks, optimisers and the loss scaler: all tensors that an update changes."""
        return self._parts

    @property
    def counts(self) -> dict[str, float]:
        """All numbers that an update changes."""
        return self._counts

    def restore_counts(self, counts: Mapping[str, float]) -> None:
        """Set the numbers back to those of a copy of `counts`."""
        self._counts.update(counts)

    def keep(self, **parts: Stateful) -> None:
        """Hold networks and optimisers in checkpoints, by these names."""
        self._parts |= parts

    def _keep_attributes(self) -> None:
        """Keep all modules and optimisers, by their attributes' names without leading "_"."""
        self.keep(
            **{
                name.removeprefix("_"): part
                for name, part in vars(self).items()
                if isinstance(part, nn.Module | torch.optim.Optimizer)
            }
        )

    def _adam_of(self, groups: list[dict[str, Any]], **how: Any) -> Adam:  # noqa: ANN401 - Adam's
        """An optimiser of groups of parameters on this device."""
        return Adam(groups, fused=True, capturable=self._device.type == "cuda", **how)

    def precision_scalars(self) -> dict[str, Tensor]:
        """Scalars on the device beside the losses, for logs; see Precision.scalars."""
        return self._precision.scalars()

    def outliers(self) -> dict[str, str]:
        """Describe what the last update clipped, by what it is of; waits for the device."""
        return {}

    def _capture(
        self, name: str, function: Callable[..., Outputs], *, in_place: bool = False
    ) -> Captured:
        """A part of `update` that runs on the device from end to end, captured as CUDA graphs.

        Args:
            name: name for metrics and the log.
            function: function to capture; see Captured.
            in_place: True to capture on the caller's own tensors, without a copy.
        """
        generators, recover = (self._generator,), self._precision.recover
        return Captured(name, function, self.graphs, generators, in_place=in_place, recover=recover)

    def graph_bytes(self, rows: int) -> float:
        """Device memory that its graphs take beside networks and storage, if that is known.

        Args:
            rows: environment rows of an update.
        """
        return 0.0

    def make_storage(self, spec: EnvSpec, max_policy_lag: int | None) -> UnrollStorage[Any]:
        """Make the storage that keeps rows until `update`; here each row is learned from once.

        Args:
            spec: the run's spec.
            max_policy_lag: limit from LearnerConfig.policy_lag; None in the sync pipeline.
        """
        return RolloutStorage(
            spec,
            self.unroll_length,
            self.rows_per_update,
            max_policy_lag,
            self._device,
            self.extras,
            self.memory_size,
            self.unrolls_per_update,
            self.frames,
        )

    @abstractmethod
    def update(self, batch: B) -> dict[str, Tensor]:
        """Learn from a batch; returns named scalars on the device, for logs."""

    @abstractmethod
    def make_policy(self) -> Policy:
        """A new policy that acts as the algorithm would now, and stays so until published to."""

    @abstractmethod
    def publish(self, policy: Policy) -> None:
        """Copy what was learned into a policy of `make_policy`; no thread may act with it now."""

    def snapshot(self) -> Policy:
        """Return a policy of `make_policy` that is given what the environment sends."""
        policy = self.make_policy()
        if not self.transforms.acts:
            return policy
        return TransformedPolicy(policy, self.transforms.snapshot())

    @property
    def acting_parts(self) -> list[str]:
        """Return the names of the parts by whose weights `evaluated` acts, transforms aside."""
        return [name for name, part in self.parts.items() if isinstance(part, nn.Module)][:1]

    def evaluated(self) -> Policy:
        """Return the policy to evaluate, load and export; by default that of `snapshot`."""
        return self.snapshot()

    def refresh(self, snapshot: Policy) -> None:
        """Copy what was learned into a policy of `snapshot`; no thread may act with it now."""
        if not isinstance(snapshot, TransformedPolicy):
            self.publish(snapshot)
            return
        self.publish(snapshot.inner)
        self.transforms.publish(snapshot.transforms)

    def compile(self, backend: str = "inductor") -> None:
        """Have torch.compile look at every network when it is first used; weights stay.

        Policies are copies and act uncompiled: their batches differ in size from call to call.
        """
        for part in self._parts.values():
            if isinstance(part, nn.Module):
                part.compile(backend=backend)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: tensors, numbers, strings, lists and dicts."""
        return {
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "counts": dict(self._counts),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, also one of another device or precision.

        Then random numbers start from the seed, and a missing loss scaler is re-initialized.
        Learning rates are those of the configuration.

        Raises:
            KeyError: if either has a part that the other lacks.
        """
        if unknown := sorted(state["parts"].keys() - self._parts.keys()):
            raise KeyError(f"the checkpoint has {', '.join(unknown)}, which nothing here takes")
        for name, part in self._parts.items():
            saved = state["parts"][name]
            if isinstance(part, torch.optim.Optimizer):
                how = [{k: group[k] for k in _HOW_IT_STEPS} for group in part.param_groups]
                part.load_state_dict(saved)
                for group, own in zip(part.param_groups, how, strict=True):
                    group |= own
            elif name != _SCALER:
                part.load_state_dict(saved)
            elif saved:
                own = part.state_dict()
                part.load_state_dict(saved | {k: own[k] for k in _HOW_IT_SCALES if k in own})
        self._counts = dict(state["counts"])
        self.graphs.reset()  # optimisers have other tensors now
        restore_generator(self._generator, state["generator"])


class ActionsError(SpecError):
    """Refusal of an environment's actions; `build_algorithm` adds the algorithm's name."""


def require_discrete(spec: EnvSpec) -> int:
    """Return the number of actions to choose from.

    Raises:
        ActionsError: if they are not discrete.
    """
    action = spec.action
    if isinstance(action, Continuous):
        bounded = math.isfinite(action.low) and math.isfinite(action.high)
        others = ", or maddpg, matd3, masac, ddpg, td3 or sac" if bounded else ""
        raise ActionsError(
            f"needs discrete actions; '{spec.name}' has {action}; {_SEVERAL}{others}"
        )
    if isinstance(action, Composite) and not action.factors:
        raise ActionsError(
            f"needs discrete actions; '{spec.name}' has {action.size} numbers with "
            f"the bounds {_bounds_text(action)}; {_SEVERAL}"
        )
    require_single(spec)
    assert isinstance(action, Discrete)
    return action.num_actions


def require_single(spec: EnvSpec) -> None:
    """Refuse actions of several parts, which only policies of several parts can take.

    Raises:
        ActionsError: for such actions, naming the fix.
    """
    action = spec.action
    if not isinstance(action, Composite):
        return
    advice, numbers = _SEVERAL, f" and {action.size} numbers" if action.size else ""
    combinations = math.prod(action.factors)
    if not action.size and combinations <= MOST_JOINT_ACTIONS:
        advice += (
            f", or set environment.joint_actions: true: each of the {combinations} combinations "
            "is then one action"
        )
    raise ActionsError(
        f"takes one choice or numbers within one range; '{spec.name}' has choices "
        f"among {list(action.factors)}{numbers} at once; {advice}"
    )


def require_bounds(spec: EnvSpec) -> tuple[float, float]:
    """Return the lowest and the highest number of continuous actions.

    Raises:
        ActionsError: if they are not finite, or not those of all numbers.
    """
    action = spec.action
    if isinstance(action, Continuous) and math.isfinite(action.low) and math.isfinite(action.high):
        return action.low, action.high
    if isinstance(action, Composite) and action.factors:
        require_single(spec)
    raise ActionsError(
        f"needs actions with finite bounds, the same for all numbers; '{spec.name}' "
        f"has {_bounds_text(action)}; {_SEVERAL}, or bound the actions in a factory of your own, "
        "for example with gymnasium.wrappers.TransformAction"
    )


def _bounds_text(action: ActionSpec) -> str:
    """Return the different bounds of the numbers, such as [-1, 1], [0, inf]."""
    bounds = zip(*action_bounds(action), strict=True)
    return ", ".join(dict.fromkeys(f"[{low:g}, {high:g}]" for low, high in bounds))


def algorithm_config(config: PluginConfig) -> AlgorithmConfig:
    """The checked options of the configured algorithm, to be asked.

    Raises:
        ConfigError: for an unknown algorithm or option.
    """
    options = resolve_plugin("algorithm", config).options
    return options if isinstance(options, AlgorithmConfig) else AlgorithmConfig()


def with_options(config: ExperimentConfig, options: AlgorithmConfig) -> ExperimentConfig:
    """The configuration with these options of its algorithm."""
    algorithm = PluginConfig(name=config.algorithm.name, **plain_data(options))
    return config.model_copy(update={"algorithm": algorithm})


def grown(config: ExperimentConfig, spec: EnvSpec) -> ExperimentConfig:
    """The configuration, of the whole group, with minibatches as its environments make them.

    Raises:
        ConfigError: see OnPolicyConfig.for_environments.
    """
    options = algorithm_config(config.algorithm)
    if not isinstance(options, OnPolicyConfig):
        return config
    remembers = bool(config.network.options.get("recurrent"))
    settled = options.for_environments(
        config.total_envs, spec.acting_agents, spec.max_episode_steps, remembers=remembers
    )
    return config if settled is options else with_options(config, settled)


def build_algorithm(
    config: PluginConfig,
    spec: EnvSpec,
    network: PluginConfig,
    precision: Precision,
    device: torch.device,
    seed: int,
    augment: AugmentConfig | None = None,
    imitation: ImitationConfig | None = None,
) -> Algorithm[Any]:
    """Build the configured algorithm for this spec, with the transforms of its batches.

    In a group the options are one rank's share, see AlgorithmConfig.for_rank.

    Args:
        config: name and options of the algorithm.
        spec: spec of the environment.
        network: name and options of the network.
        precision: precision of forward passes; has the group of the ranks.
        device: device to learn on.
        seed: seed of the first weights and of the algorithm's random draws.
        augment: section of the configuration; None: nothing is augmented.
        imitation: section of the configuration; None: imitation does not end.

    Raises:
        ConfigError: for an unknown algorithm or option, or an augmentation that does not fit.
        SpecError: if the algorithm does not fit the spec.
    """
    plugin = resolve_plugin("algorithm", config)
    options: Any = plugin.options
    if isinstance(options, TeamsConfig) and options.teams:
        return _build_teams(
            plugin, spec, network, precision, device, seed, augment=augment, imitation=imitation
        )
    shared = options if isinstance(options, SharingConfig) else SharingConfig()
    agents = spec.num_agents
    if imitation is not None and imitation.dataset:
        spec = with_expert(spec)
    transforms = build_transforms(
        spec,
        resolve_network(network, observed_image(spec)),
        augment,
        imitation,
        frozen=shared.frozen_agents,
        slices=shared.slices(agents),
        reward_sets=shared.reward_sets(agents) if shared.normalize_rewards else None,
        group=precision.group,
        device=device,
    )
    if spec.takes_turns:  # before others find options that do not fit the environment
        _require_turns(config.name, plugin.module.build, spec)
    about = options.about if isinstance(options, AlgorithmConfig) else About()
    rows = about.learned_at_once * (agents if about.joint else 1)
    at_once = learning_from(rows, device, precision.dtype.itemsize)
    with plugin_failures(f"algorithm '{config.name}'"), at_once:
        seen = transforms.spec(spec)
        try:
            algorithm: Algorithm[Any] = plugin.module.build(
                options, seen, network, precision, device, seed
            )
        except ActionsError as error:
            raise SpecError(f"{config.name} {error}") from None
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"algorithm '{config.name}' gave a {type(algorithm).__name__}; derive it from "
            "murmur.learner_service.learning.base.Algorithm"
        )
    if spec.observation(EXPERT_ACTION) and not algorithm.IMITATES:
        replayed = ""
        if hasattr(options, "replay"):
            replayed = ": its replay takes recorded episodes, algorithm.replay.dataset"
        raise ConfigError(
            f"imitation: algorithm '{config.name}' does not imitate; set coma, mappo, happo, ippo "
            f"or ppo, or leave imitation out{replayed}"
        )
    if spec.takes_turns:
        _require_turns(config.name, algorithm, spec)
    algorithm.transforms, algorithm.frames = transforms, transforms.frames
    algorithm.keep(**transforms.state())
    return algorithm


def _build_teams(
    plugin: Plugin,
    spec: EnvSpec,
    network: PluginConfig,
    precision: Precision,
    device: torch.device,
    seed: int,
    *,
    augment: AugmentConfig | None,
    imitation: ImitationConfig | None,
) -> Algorithm[Any]:
    """Build an algorithm for each team, and one that holds them all; see `build_algorithm`.

    Raises:
        ConfigError: if an option does not fit its team, naming it.
    """
    options: TeamsConfig = plugin.options
    if spec.takes_turns:
        raise ConfigError(
            f"algorithm.teams: in '{spec.name}' agents take turns, and one policy plays all sides; "
            "leave teams out"
        )
    if augment is not None and augment.preset == "symmetry":
        raise ConfigError(
            "augment.preset=symmetry mirrors the observations of all agents together, and "
            "algorithm.teams trains teams apart; leave one of them out"
        )
    agents, image = agents_of_teams(options, spec), observed_image(spec)
    sharing = {}
    if isinstance(options.share_parameters, tuple):
        sharing = shared_within(options.slices(spec.num_agents), agents)
    learning_agents(options.frozen_agents, spec.num_agents)
    members = []
    for number, (team, numbers) in enumerate(agents.items()):
        own, where = options.of_team(team), f"algorithm.teams.{team}"
        frozen = tuple(i for i, agent in enumerate(numbers) if agent in options.frozen_agents)
        learns = len(frozen) < len(numbers)
        changes: dict[str, Any] = {"frozen_agents": frozen if learns else ()}
        if team in sharing and not own.share_parameters:
            changes["share_parameters"] = sharing[team]
        # Agent-transitions of all teams: each learns from its own in as many minibatches.
        size = getattr(own.options, "batch_size", 0) * len(numbers)
        changes["batch_size"] = math.ceil(size / spec.num_agents)
        view = View.of(team, numbers, spec, centralized=getattr(own.options, "centralized", False))
        built = build_algorithm(
            PluginConfig(name=plugin.name, **plain_data(own.options.changed(changes))),
            view.spec,
            network_of_team(network, own.network, image, f"{where}.network"),
            precision,
            device,
            seed + _SEEDS_APART * number,
            augment,
            imitation,
        )
        members.append((view, built, learns))
    teams: Algorithm[Any] = plugin.module.TEAMS(options, members, precision, device, seed)
    return teams


def _require_turns(name: str, algorithm: Any, spec: EnvSpec) -> None:  # noqa: ANN401
    """Check that an algorithm, its class or what builds it, can learn where agents take turns.

    Raises:
        ConfigError: if it cannot, or if many moves would be left out because unrolls are short.
    """
    if not getattr(algorithm, "TAKES_TURNS", True):
        raise ConfigError(
            f"algorithm '{name}' learns from every agent in every step, and in '{spec.name}' "
            "agents take turns; set mappo, ippo or ppo"
        )
    least = 2 * spec.num_agents
    steps = getattr(algorithm, "unroll_length", 0)
    if 0 < steps < least:
        raise ConfigError(
            f"algorithm.unroll_steps = {steps}: in '{spec.name}' "
            f"{spec.num_agents} agents take turns, and a move is learned from only if the agent's "
            f"next turn is in the same unroll; set it to {least} or more, or to 0"
        )
