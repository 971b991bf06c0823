"""The contract of an algorithm.

An algorithm plug-in is a module `learner_service/algorithms/<name>.py` that has

    Config                                                    a frozen pydantic model
    build(config, spec, network, precision, device, seed)  -> Algorithm

`package.module:Name` names a subclass of Algorithm that is a plug-in by itself: see
shared.config.named_plugin.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from learner_service.algorithms.options import About, OnPolicyConfig
from learner_service.algorithms.options import AlgorithmConfig as AlgorithmConfig
from learner_service.augment import Augment, build_rl_augment
from learner_service.networks.building import NORMALISE, observed_image, resolve_network
from learner_service.runtime.adam import Adam
from learner_service.runtime.cuda_graph import Captured, Graphs, Outputs
from learner_service.runtime.device import restore_generator
from learner_service.runtime.memory import learning_from
from learner_service.runtime.precision import Precision
from learner_service.storage.feed import Taken
from learner_service.storage.frames import Frames, find_frames
from learner_service.storage.rollout_storage import RolloutStorage
from learner_service.storage.storage import OBSERVATION, Storage
from shared.config import PluginConfig
from shared.config.experiment import AugmentConfig, ExperimentConfig
from shared.config.plugins import plugin_failures, resolve_plugin
from shared.config.text import plain_data
from shared.errors import ConfigError, SpecError
from shared.spec import EXPERT_ACTION, Discrete, EnvSpec

B = TypeVar("B", bound=Taken)
NEXT = "next/"  # prefix of the arrays of row t + k in an update from a replay
_SCALER = "scaler"
# Of an optimiser: the configuration's and the device's, not the state's.
_HOW_IT_STEPS = ("lr", "fused", "foreach", "capturable")
_HOW_IT_SCALES = ("growth_factor", "backoff_factor", "growth_interval")  # of a loss scaler, as well


class Stateful(Protocol):
    """A network, an optimiser, a loss scaler."""

    def state_dict(self) -> dict[str, Any]:
        """What to save."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:  # noqa: ANN401 - torch's own
        """Take it back."""


class Policy(ABC):
    """A snapshot of what an algorithm has learned, to act with. Used by the inference thread.

    Attributes:
        memory_size: H, numbers that each agent carries from row to row of an episode; 0: none.
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
            generator: where exploration draws its numbers from; None: act greedily.
            memory: [B, A, H] float32 if memory_size is not 0: what the last row's `act` returned
                as "memory", zero where an episode begins.

        Returns:
            "action": [B, A] int32 or [B, A, U] float32, as it goes to the environment, on the
            device; the algorithm's `extras` by name; "memory" if memory_size is not 0; and if
            greedy, what the action was chosen by: "logits" [B, A, K] or "mean" [B, A, U], if there
            is such (see export).
        """


class Algorithm(ABC, Generic[B]):
    """Learns from batches. Used by the thread that learns, but for the policies it hands out.

    Attributes:
        IMITATES: whether it learns from what an expert would have done, see `imitation`.
        graphs: CUDA graphs of its updates; the caller sets `graphs.enabled`.
        unroll_length: L, transitions of one unroll; 0: the storage chooses it.
        unrolls_per_update: unrolls that an update takes, at least; 0: the storage chooses.
        rows_per_update: agent-transitions an update learns from, at least.
        extras: what a policy's `act` returns beside the action, to be kept with the row: name ->
            shape per agent, float32.
        augment: what changes batches before it learns from them; None: nothing.
        memory_size: that of its policies; the storage keeps what each unroll's first row was acted
            with.
        frames: images that are stacked, if any; then `stacking` has built it for the stacks, and
            its storage keeps single frames.
    """

    IMITATES = False
    unroll_length: int
    rows_per_update: int
    unrolls_per_update: int = 0
    extras: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    memory_size: int = 0
    augment: Augment | None = None
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
            name: for metrics and the log.
            function: see Captured.
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

    def make_storage(self, spec: EnvSpec, max_policy_lag: int | None) -> Storage[Any]:
        """Where rows are kept until `update` gets them; this one for learning once from each.

        Args:
            spec: the run's spec.
            max_policy_lag: see LearnerConfig.policy_lag; None in the sync pipeline.
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


def require_discrete(algorithm: str, spec: EnvSpec) -> int:
    """The number of actions.

    Raises:
        SpecError: if they are not discrete.
    """
    if not isinstance(spec.action, Discrete):
        raise SpecError(
            f"{algorithm} needs discrete actions; '{spec.name}' has {spec.action}; use mappo, "
            "maddpg or masac"
        )
    return spec.action.num_actions


def require_bounds(algorithm: str, spec: EnvSpec) -> tuple[float, float]:
    """The lowest and the highest number of continuous actions.

    Raises:
        SpecError: if they are not finite.
    """
    assert not isinstance(spec.action, Discrete)
    low, high = spec.action.low, spec.action.high
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise SpecError(
            f"{algorithm} needs actions with finite bounds, low < high; '{spec.name}' has "
            f"[{low}, {high}]"
        )
    return low, high


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
        config.total_envs, spec.num_agents, spec.max_episode_steps, remembers=remembers
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
) -> Algorithm[Any]:
    """The configured algorithm for this spec; without `augment` it learns from batches as they are.

    In a group the options are one rank's share, see AlgorithmConfig.for_rank.

    Raises:
        ConfigError: for an unknown algorithm or option, or an augmentation that does not fit.
        SpecError: if the algorithm does not fit the spec.
    """
    from learner_service.algorithms.normalising import normalising
    from learner_service.algorithms.stacking import Stacking  # algorithms themselves

    plugin = resolve_plugin("algorithm", config)
    options: Any = plugin.options
    net = resolve_network(network, observed_image(spec))
    frames = find_frames(net.frame_stack, spec)
    seen = spec if frames is None else frames.stacked_spec(spec)
    about = options.about if isinstance(options, AlgorithmConfig) else About()
    rows = about.learned_at_once * (spec.num_agents if about.joint else 1)
    at_once = learning_from(rows, device, precision.dtype.itemsize)
    with plugin_failures(f"algorithm '{config.name}'"), at_once:
        algorithm: Algorithm[Any] = plugin.module.build(
            options, seen, network, precision, device, seed
        )
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"algorithm '{config.name}' gave a {type(algorithm).__name__}; derive it from "
            "learner_service.algorithms.base.Algorithm"
        )
    if spec.observation(EXPERT_ACTION) and not algorithm.IMITATES:
        raise ConfigError(
            f"imitation.baseline: algorithm '{config.name}' does not imitate; set coma, mappo, "
            "ippo or ppo, or leave imitation out"
        )
    if augment is not None:
        prefixes = (OBSERVATION, NEXT + OBSERVATION)
        algorithm.augment = build_rl_augment(augment, seen, device, prefixes)
    if frames is not None:
        algorithm = Stacking(algorithm, frames)
    if net.normalizes and augment is not None and augment.preset == "symmetry":
        raise ConfigError(
            f"augment.preset=symmetry mirrors observations in the environment's own units; set "
            f"{NORMALISE}=false"
        )
    return normalising(algorithm, options, spec, net.normalizes, precision, device)
