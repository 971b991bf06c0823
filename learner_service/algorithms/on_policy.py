"""The common part of COMA and MAPPO: an update is passes over a rollout in minibatches.

On a GPU the steps on a few minibatches are one CUDA graph, whatever the number of environments: see
`minibatches`. What is done once in an update or a pass has their number of rows, and is launched
kernel by kernel; networks are fed in blocks of one size, each a graph as well. Of larger graphs
there would be fewer to launch, and to capture one would take longer.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from learner_service.algorithms.actor_critic import ActorCritic
from learner_service.algorithms.augmented import passes
from learner_service.algorithms.minibatches import Pass, Rows, number_of_minibatches
from learner_service.algorithms.options import OnPolicyCriticConfig
from learner_service.algorithms.returns import sharing_agents
from learner_service.algorithms.schedule import Schedule
from learner_service.algorithms.steps import blocks, fed, named
from learner_service.networks.casting import cast_weights
from learner_service.networks.forward import chunk_rows, forward, forward_rows
from learner_service.networks.inputs import Inputs
from learner_service.networks.recurrent import RecurrentState
from learner_service.runtime.cuda_graph import Captured, Outputs
from learner_service.runtime.precision import Precision
from learner_service.runtime.streams import Pace
from learner_service.storage.flight import transitions_in
from learner_service.storage.joining import lengthened
from learner_service.storage.rollout import Batch
from shared.config import PluginConfig
from shared.spec import EXPERT_ACTION, EnvSpec

# Of the policy and of the critic.
RecurrentStates = tuple[RecurrentState | None, RecurrentState | None]
Step = Callable[[Mapping[str, Tensor]], Outputs]
_MOST_AT_ONCE = 16  # minibatches of a graph
_MOST_ROWS = 8192  # of agents, that a network is fed at once
_ROOM = 33 / 32  # of a minibatch of fixed size: the number of minibatches is a whole one


class OnPolicyAlgorithm(ActorCritic[Batch]):
    """Learns from each rollout once. Used by the learner thread.

    `_learn(batch, number)` learns from a Batch in `number` minibatches a pass, and returns scalars
    in the order of `_logged`. It may change `batch.arrays`, not what is in them.
    """

    REMEMBERS = True
    _config: OnPolicyCriticConfig
    _logged: tuple[str, ...]
    _single = False  # minibatches are of single agents' rows

    def __init__(
        self,
        config: OnPolicyCriticConfig,
        spec: EnvSpec,
        network: PluginConfig,
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        """See ActorCritic."""
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
        self._outputs = self._capture("forward", self._forward_block)
        self._pace = Pace(device)
        self._longest = 0
        self._first_calls = True

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Learn from a rollout, in minibatches of joint rows.

        With memory a minibatch is some of the environments, whole: from what was remembered at the
        unroll's first row to its end.

        Returns:
            the scalars of `_logged`, means over the update and over parameter groups.
        """
        self._schedule.set(self._counts["updates"])
        arrays = dict(self._frozen.hidden(batch.arrays))
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
        # Libraries see some shapes for the first time.
        with self.graphs.eager() if self._first_calls else nullcontext():
            scalars = self._learn(Batch(arrays, []), number)
        self._first_calls = False
        self._schedule.restore()
        self._counts["updates"] += 1
        return dict(zip(self._logged, scalars.unbind(), strict=True))

    @abstractmethod
    def _learn(self, batch: Batch, number: int) -> Tensor:
        """See the class."""

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

    def _network_outputs(
        self, network: nn.Module, inputs: Inputs, state: RecurrentState | None = None
    ) -> Tensor:
        """[B, A, K] float32 for any number of joint rows; nothing here carries gradient."""
        agents = inputs.agents
        if not self._static:
            return forward_rows(network, inputs, self._precision, agents, state)
        size = self._width
        if state is None:
            whole = -(-size * self._config.batch_number * 9 // 8)
            size = max(1, min(chunk_rows(inputs, _MOST_ROWS) // agents, whole))
        found: Tensor | None = None
        for start, stop, part, before in blocks(inputs, state, size):
            out = self._call(self._outputs, named("rows", part, before), network=network)["out"]
            out = out.view(-1, size, *out.shape[1:])  # [T, size, A, K]; T is 1 without memory
            if found is None:
                envs = len(state.memory) if state is not None else inputs.batch
                found = out.new_empty((len(out), envs, *out.shape[2:]))
            found[:, start:stop].copy_(out[:, : stop - start])
        assert found is not None
        return found.flatten(0, 1)

    @torch.no_grad()
    def _forward_block(self, given: Mapping[str, Tensor], *, network: nn.Module) -> Outputs:
        """A pass of `_network_outputs`, which may be captured."""
        with cast_weights(self._precision, network):
            out, _ = forward(network, *fed("rows", given))
        return {"out": out.float()}

    def _call(self, step: Captured, given: Mapping[str, Tensor], **options: nn.Module) -> Outputs:
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
            self._static,
            hidden[0] and hidden[0].without_last(),
            hidden[1] and hidden[1].without_last(),
            self._group,
        )

    def _passes(
        self, rows: Rows, batch: Batch, number: int
    ) -> Iterator[tuple[Pass, dict[str, Tensor]]]:
        """Shuffled minibatches of each pass over the rows, with their learning rates."""
        how = batch, self.augment, self._generator, self._fed, self._single
        for seen in passes(rows, self._config.data_passes, *how):
            shuffled = seen.shuffled(number, self._generator, self._width)
            if shuffled.number:
                yield shuffled, self._schedule.rates(shuffled.counts)

    @abstractmethod
    def _fed(self, obs: dict[str, Tensor], action: Tensor) -> tuple[Inputs, Inputs]:
        """Inputs of actor and critic."""


class Steps:
    """A step on each of n minibatches, one after the other.

    Gets tensors [n, ...] by name, and returns what the steps do, [n, ...].
    """

    def __init__(
        self,
        algorithm: OnPolicyAlgorithm,
        name: str,
        step: Step,
        prepare: Step = lambda _: {},
        finish: Callable[[Mapping[str, Tensor], Outputs], Outputs] = lambda _, found: found,
    ) -> None:
        """Capture nothing yet.

        Args:
            algorithm: that learns.
            name: see Captured.
            step: of named tensors of one minibatch.
            prepare: further tensors for the steps, [n, ...] of those of n minibatches: kernels
                here run once for all of them.
            finish: outputs, of what the steps were given and what they return, both [n, ...].
        """
        self._algorithm, self._step = algorithm, step
        self._prepare, self._finish = prepare, finish
        self._captured = algorithm._capture(name, self._together)

    def _together(self, given: Mapping[str, Tensor]) -> Outputs:
        """The steps of a block, which may be captured."""
        number = len(next(iter(given.values())))
        with torch.no_grad():
            given = {**given, **self._prepare(given)}
        found = [self._step({k: x[i] for k, x in given.items()}) for i in range(number)]
        with torch.no_grad():
            return self._finish(given, {k: torch.stack([of[k] for of in found]) for k in found[0]})

    def __call__(self, given: Mapping[str, Tensor]) -> Outputs:
        """Make the steps, on a GPU a block of them at a time."""
        algorithm = self._algorithm
        if not algorithm._static:
            return self._together(given)
        number, found = len(next(iter(given.values()))), dict[str, Tensor]()
        for start in range(0, number, algorithm._block):
            block = slice(start, start + algorithm._block)
            part = algorithm._call(self._captured, {k: x[block] for k, x in given.items()})
            found = found or {k: x.new_empty((number, *x.shape[1:])) for k, x in part.items()}
            torch._foreach_copy_([found[k][block] for k in part], list(part.values()))
        return found
