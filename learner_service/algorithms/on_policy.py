"""The common part of COMA and MAPPO: an update is passes over a rollout in minibatches.

On a GPU all of it is a few CUDA graphs, of the steps on a few minibatches each, whatever the number
of environments: see `fixed_shapes`. Of larger graphs there would be fewer to launch, and to capture
one would take longer.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from typing_extensions import override

from learner_service.algorithms.actor_critic import ActorCritic
from learner_service.algorithms.fixed_shapes import FixedShapes
from learner_service.algorithms.minibatches import Pass, Rows, number_of_minibatches
from learner_service.algorithms.options import OnPolicyCriticConfig
from learner_service.algorithms.schedule import Schedule
from learner_service.algorithms.steps import fed
from learner_service.networks.casting import cast_weights
from learner_service.networks.forward import chunk_of, forward, forward_rows
from learner_service.networks.inputs import ActorInputs, CriticInputs, Inputs
from learner_service.networks.recurrent import RecurrentState
from learner_service.networks.stacked import sharing_agents
from learner_service.runtime.cuda_graph import Captured, Outputs
from learner_service.runtime.precision import Precision
from learner_service.runtime.streams import Pace
from learner_service.storage.flight import transitions_in
from learner_service.storage.joining import lengthened
from learner_service.storage.rollout import Batch
from learner_service.storage.storage import OBSERVATION
from shared.config import PluginConfig
from shared.spec import EXPERT_ACTION, EnvSpec

# Of the policy and of the critic.
RecurrentStates = tuple[RecurrentState | None, RecurrentState | None]
Step = Callable[[Mapping[str, Tensor]], Outputs]
_MOST_AT_ONCE = 16  # minibatches of a graph
_MOST_ROWS = 8192  # of agents, that a network is fed at once
_ROOM = 33 / 32  # of a minibatch of fixed size: the number of minibatches is a whole one


class OnPolicyAlgorithm(ActorCritic[Batch]):
    """Learns from each rollout once. Used by the thread that learns.

    `_learn(batch, number)` learns from a Batch in `number` minibatches a pass, and returns scalars
    in the order of `_logged`. It may change `batch.arrays`, not what is in them.
    """

    REMEMBERS = True
    _OF_BATCH: int  # numbers that `_learnable` returns for `_scalars`
    _config: OnPolicyCriticConfig
    _critic_inputs: ActorInputs | CriticInputs
    _logged: tuple[str, ...]
    _of_steps: tuple[str, ...]  # those of them that are means over minibatches
    _single = False  # minibatches are of single agents' rows
    _columns: tuple[str, ...]  # of numbers that `_learnable` returns
    _steps_in_graphs: tuple[Captured, ...]  # of a pass, each over all of its minibatches

    @override
    def __init__(
        self,
        config: OnPolicyCriticConfig,
        spec: EnvSpec,
        network: PluginConfig,
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        self._imitates = spec.observation(EXPERT_ACTION) is not None
        self._static = device.type != "cpu"  # no shape depends on what rows hold
        self._sharing = sharing_agents(config.slices(spec.num_agents), device)
        super().__init__(config, spec, network, precision, device, seed)
        c = config
        self.unroll_length, self.unrolls_per_update = c.unroll_steps, c.unrolls_per_update
        self.rows_per_update = c.batch_size * c.batch_number
        self._schedule = Schedule(
            [optimizer for optimizer, _ in self._learned],
            c.entropy_weight,
            c.anneal_updates,
            c.final_lr_fraction,
            device,
            static=self._static,
        )
        self._counts = {"updates": 0}
        self._total = torch.zeros(len(self._of_steps) + 1, device=device)  # and minibatches
        self._of_batch = torch.zeros(self._OF_BATCH, device=device)
        self._fixed = FixedShapes(self, self._columns)
        self._steps_in_graphs = tuple(
            self._fixed.capture(name, step) for name, step in self._blocks_of_steps().items()
        )
        self._pace = Pace(device)
        self._longest = 0

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Learn from a rollout, in minibatches of joint rows.

        With memory a minibatch is some of the environments, whole: from what was remembered at the
        unroll's first row to its end.

        Returns:
            the scalars of `_logged`, means over the update and over parameter groups.
        """
        self._schedule.set(self._counts["updates"])
        arrays = dict(batch.arrays)
        if self._static and self.memory_size:  # a graph has one number of steps
            own = {"steps": max(self._longest, len(arrays["step_type"]))}
            self._longest = round(self._group.agree(own, "max")["steps"])
            arrays = lengthened(arrays, self._longest)
        number = number_of_minibatches(
            self._config.batch_number,
            batch.times,
            self._group,
            units=self._units(batch),
            width=self._width,
            block=self._block,
        )
        self.graphs.eager_calls["update"] += not self._static
        learn = self._learn_in_graphs if self._static else self._learn
        scalars = learn(Batch(arrays, []), number)
        self._schedule.restore()
        self._counts["updates"] += 1
        return dict(zip(self._logged, scalars.unbind(), strict=True))

    @abstractmethod
    def _learn(self, batch: Batch, number: int) -> Tensor:
        """See the class."""

    @override
    def graph_bytes(self, rows: int) -> float:
        return self._fixed.expected_bytes(rows)

    def _learn_in_graphs(self, batch: Batch, number: int) -> Tensor:
        """`_learn` on a GPU."""
        fixed, arrays = self._fixed, batch.arrays
        fixed.load(arrays, number)
        arrays = self._completed(arrays)
        words = fixed.pack(arrays)
        fixed.prepare(words)
        memory = arrays["memory"][0] if self.memory_size else None
        for k in range(self._config.data_passes):
            if k and self.transforms.draws:
                words = fixed.pack(arrays, again=True)
                fixed.add_columns(words)
            for steps in self._steps_in_graphs:
                for start in range(0, number, self._block):
                    self._call(steps, fixed.gather(words, memory, k, start))
        return self._scalars(self._total, self._of_batch)

    @abstractmethod
    def _blocks_of_steps(self) -> dict[str, Callable[[Mapping[str, Tensor]], Outputs]]:
        """Steps on all minibatches of a block, by name; they add to `_total`."""

    def _completed(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch's arrays with what it lacks."""
        return arrays

    @abstractmethod
    def _values_of_rows(
        self,
        inputs: tuple[Inputs, Inputs],
        states: RecurrentStates,
        action: Tensor,
        obs: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """What `_learnable` needs of rows, [R, A] by name.

        Args:
            inputs: of actor and critic.
            states: the same.
            action: [R, A, ...].
            obs: name -> [R, A, ...].
        """

    @abstractmethod
    def _learnable(
        self, batch: Batch, values: Mapping[str, Tensor], rows: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """What minibatches learn from; called once an update, may be captured.

        Args:
            batch: its small arrays, [L + 1, B, ...], padded.
            values: of `_values_of_rows`, [L + 1, B, A].
            rows: scalar, L x B without padding.

        Returns:
            `_columns` [L, B, A] by name, 1 where a row counts, else 0, and what `_scalars` needs.
        """

    @abstractmethod
    def _scalars(self, total: Tensor, of_batch: Tensor) -> Tensor:
        """`_logged` of sums over minibatches, and of what `_learnable` found."""

    def _derived(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Columns of minibatches, with those that follow from others."""
        return columns

    def _units(self, batch: Batch) -> int:
        """Units of minibatches that may count: environments, joint rows, or rows of agents."""
        if self.memory_size:
            return batch.arrays["step_type"].shape[1]
        return batch.rows * (self._spec.num_agents if self._single else 1)

    @property
    def _width(self) -> int:
        """Units of a minibatch, on a GPU: the same whatever the number of environments."""
        if not self._static:
            return 0
        c, steps = self._config, self._spec.max_episode_steps
        wanted = c.batch_size / (1 if self._single else self._spec.num_agents)  # transitions
        if self.memory_size:
            units = wanted / transitions_in(self._longest - 1, steps)
        else:  # a step of the longest episodes leads from one's end to the next one's beginning
            units = wanted * (1 + (1 / steps if steps else 0))
        return math.ceil(_ROOM * units) + (self._group.size > 1)

    @property
    def _block(self) -> int:
        """Minibatches of a graph."""
        number = self._config.batch_number
        return max(k for k in range(1, _MOST_AT_ONCE + 1) if number % k == 0)

    @property
    def _rows_at_once(self) -> int:
        """Joint rows that networks are fed at once on a GPU; environments with memory."""
        if self.memory_size:
            return self._width
        agents, width = self._spec.num_agents, self._width
        joint = width / agents if self._single else width
        whole = math.ceil(joint * self._config.batch_number * 9 / 8)  # with unrolls' last rows
        shapes = self._actor_inputs.shape.image, self._critic_inputs.shape.image
        most = min(chunk_of(image, _MOST_ROWS) for image in shapes)
        return max(1, min(most // agents, whole))

    def _network_outputs(
        self, network: nn.Module, inputs: Inputs, state: RecurrentState | None = None
    ) -> Tensor:
        """[B, A, K] float32 for any number of joint rows; nothing here carries gradient."""
        return forward_rows(network, inputs, self._precision, inputs.agents, state)

    @torch.no_grad()
    def _forward_block(self, given: Mapping[str, Tensor], *, network: nn.Module) -> Outputs:
        """Outputs of a network for the rows of a minibatch."""
        return {"out": self._forward(network, *fed("rows", given))}

    def _forward(self, network: nn.Module, inputs: Inputs, state: RecurrentState | None) -> Tensor:
        """As `_network_outputs`, all rows at once."""
        with cast_weights(self._precision, network):
            out, _ = forward(network, inputs, state)
        return out.float()

    def _call(self, step: Captured, given: Mapping[str, Tensor], **options: int) -> Outputs:
        """Run a graph, a few of them ahead of the device at most.

        What it returns the next call overwrites.
        """
        outputs = step(given, **options)
        self._pace.given()
        return outputs

    def _rows(
        self,
        inputs: tuple[Inputs, Inputs],
        columns: dict[str, Tensor],
        weight: Tensor,
        hidden: RecurrentStates,
    ) -> Rows:
        """What minibatches are of; `hidden` is that of all rows, the last included."""
        return Rows(
            *inputs,
            columns,
            weight,
            self._sharing,
            hidden[0] and hidden[0].without_last(),
            hidden[1] and hidden[1].without_last(),
            self._group,
        )

    def _passes(
        self, rows: Rows, batch: Batch, number: int
    ) -> Iterator[tuple[Pass, dict[str, Tensor]]]:
        """Shuffled minibatches of each pass over the rows, with their learning rates."""
        first = rows.of_single_agents() if self._single else rows
        for k in range(self._config.data_passes):
            seen = first
            if k and self.transforms.draws:
                again = self._rows_redrawn(rows, batch)
                seen = again.of_single_agents() if self._single else again
            shuffled = seen.shuffled(number, self._generator)
            if shuffled.number:
                yield shuffled, self._schedule.rates(shuffled.counts)

    @torch.no_grad()
    def _rows_redrawn(self, rows: Rows, batch: Batch) -> Rows:
        """Return rows of a batch with what was seen and done changed at random."""
        count = len(rows.weight)
        obs = {name: x.flatten(0, 1)[:count] for name, x in batch.observation().items()}
        obs, action = self.redrawn(obs, rows.columns["action"], rows.actor_state)
        actor, critic = self._fed(obs, action)
        return replace(rows, actor=actor, critic=critic, columns=rows.columns | {"action": action})

    def redrawn(
        self, obs: dict[str, Tensor], action: Tensor, state: RecurrentState | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return observations and actions changed at random; an environment's rows change alike.

        Args:
            obs: name -> [R, A, ...].
            action: [R, A, ...].
            state: recurrent state before the first rows; None: rows are single ones.
        """
        rows = {OBSERVATION + name: x for name, x in obs.items()} | {"action": action}
        steps = 1 if state is None or state.first is None else len(state.first)
        found = self.transforms.draw(rows, self._generator, steps)
        return {name: found[OBSERVATION + name] for name in obs}, found["action"]

    @abstractmethod
    def _fed(self, obs: dict[str, Tensor], action: Tensor) -> tuple[Inputs, Inputs]:
        """Inputs of actor and critic."""


def each(step: Step, given: Mapping[str, Tensor]) -> Outputs:
    """A step on each of n minibatches, one after the other.

    Args:
        step: of named tensors of one minibatch.
        given: [n, ...] by name.

    Returns:
        what the steps do, [n, ...].
    """
    number = len(next(iter(given.values())))
    found = [step({k: x[i] for k, x in given.items()}) for i in range(number)]
    with torch.no_grad():
        return {k: torch.stack([of[k] for of in found]) for k in found[0]}
