"""The skeleton of supervised algorithms: a network, its schedule, the average of its weights.

AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), a warm-up and a cosine (arXiv:1608.03983).
Evaluations, checkpoints of the best score and exports use the average.

A subclass names its POLICY, makes `network` in `_build`, and learns in `_learn`, whose last two
calls are `Precision.step` and `follow`. Its `evaluate` passes the score to `_judge`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from murmur.learner_service.device.adam import decayed
from murmur.learner_service.device.cuda_graph import Outputs
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.casting import publish, snapshot
from murmur.learner_service.layers.dropout import draw_from
from murmur.learner_service.learning.base import Policy
from murmur.learner_service.learning.options import GradNorm
from murmur.learner_service.learning.returns import target_of
from murmur.learner_service.learning.supervised import Supervised, SupervisedConfig
from murmur.learner_service.storage.samples import SampleBatch
from murmur.shared.config import PluginConfig
from murmur.shared.wire.samples import IMAGE, MASK, SampleSpec

_SOON = 10  # updates after which the average spans half of the updates so far


def decay_after(updates: float, decay: float) -> float:
    """Share of the average that an update keeps: min(decay, (1 + n) / (10 + n)).

    Small at first, so that the random weights of the beginning are soon forgotten.
    """
    return min(decay, (1 + updates) / (_SOON + updates))


@torch.no_grad()
def follow(average: nn.Module, network: nn.Module, share: Tensor) -> None:
    """Move the average towards the network: average += share (network - average).

    Args:
        average: changed in place.
        network: network to follow; its buffers are copied.
        share: scalar on the device, 1 - decay.
    """
    mine: list[Tensor] = list(average.parameters())
    theirs: list[Tensor] = list(network.parameters())
    apart = torch._foreach_sub(theirs, mine)
    torch._foreach_mul_(apart, share)
    torch._foreach_add_(mine, list(apart))
    for buffer, new in zip(average.buffers(), network.buffers(), strict=True):
        buffer.copy_(new)


class NetworkConfig(SupervisedConfig):
    """Options of how a network learns from samples."""

    lr: float = Field(8e-4, gt=0, description="AdamW's learning rate after the warm-up")
    warmup_epochs: float = Field(5.0, ge=0, description="over which it rises linearly from 0")
    final_lr_fraction: float = Field(
        0.01, ge=0, le=1, description="what is left of it at the end of the cosine"
    )
    weight_decay: float = Field(
        1e-4, ge=0, description="AdamW's, of matrices and kernels; biases and norms have none"
    )
    max_grad_norm: GradNorm = 1.0
    ema_decay: float = Field(
        0.99,
        ge=0,
        lt=1,
        description="share of the averaged weights that an update keeps; evaluations, best.pt and "
        "exports use the average; 0: the last weights",
    )
    patience: int = Field(
        0, ge=0, description="evaluations without a better score after which the run ends; 0: never"
    )


def learning_rate(config: NetworkConfig, updates: float, per_epoch: int) -> float:
    """Learning rate of update `updates`, from 0: a linear warm-up, then half a cosine.

    With w updates of warm-up and n in all: lr (u + 1) / w while u < w, then
    lr (f + (1 - f) (1 + cos(pi (u - w) / (n - w))) / 2).

    Args:
        config: lr, warmup_epochs, epochs, final_lr_fraction (f).
        updates: u.
        per_epoch: updates of an epoch.
    """
    warm_up, total = config.warmup_epochs * per_epoch, config.epochs * per_epoch
    if updates < warm_up:
        return config.lr * min(1.0, (updates + 1) / warm_up)
    done = min(1.0, (updates - warm_up) / max(1.0, total - warm_up))
    share = config.final_lr_fraction
    return config.lr * (share + (1 - share) * (1 + math.cos(math.pi * done)) / 2)


class NetworkPolicy(Policy):
    """A frozen copy of a network; a subclass acts with it.

    Attributes:
        network: the copy.
    """

    def __init__(self, network: nn.Module, precision: Precision) -> None:
        self.network = snapshot(network, precision)
        self._precision = precision


class SupervisedNetwork(Supervised):
    """Supervised algorithm with a network and an average of its weights; see the module.

    Used by the thread that learns.

    Networks, optimisers and all other modules are parts of checkpoints, see Algorithm.

    Attributes:
        POLICY: class of the policy that is published and exported.
        network: learns.
        average: average of the network's weights; evaluated, published, exported.
    """

    POLICY: type[NetworkPolicy]
    network: nn.Module
    _learn: Callable[..., Outputs]  # (rows, phase=) an update, on the device; see Captured

    def __init__(
        self,
        config: NetworkConfig,
        spec: SampleSpec,
        network: PluginConfig,
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        """Build the network, its average and the optimiser.

        Args:
            config: configuration of the algorithm.
            spec: spec of the data set.
            network: name and options of the network.
            precision: precision of forward passes.
            device: device to learn on.
            seed: seed of the first weights and of the algorithm's random draws.

        Raises:
            SpecError: if the algorithm does not fit the samples.
            ConfigError: if the network or an option does not fit the samples.
        """
        super().__init__(precision, device, seed)
        self._config = config
        self._spec = spec
        self._network = network
        self.rows_per_update = config.batch_size
        at_once = config.batch_size * self._group.size
        self._per_epoch = max(1, -(-spec.size("train") // at_once))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._build()
        self.average = target_of(self.network).eval().to(device)
        self.network.to(device)
        draw_from(self.network, self._generator)
        self._rate = torch.zeros((), device=device)
        self._share = torch.zeros((), device=device)  # of the network in its average
        self._optimizer = self._adam_of(
            decayed(self.network, config.weight_decay), lr=self._rate, decoupled_weight_decay=True
        )
        self._keep_attributes()
        self._counts = {"updates": 0, "best_score": -1.0, "evaluations_since_best": 0}
        self._captured = self._capture("update", self._learn)

    @abstractmethod
    def _build(self) -> None:
        """Make the network, on the CPU, with weights drawn from torch's generator."""

    def update(self, batch: SampleBatch) -> dict[str, torch.Tensor]:
        """One step on a batch of images and masks.

        Returns:
            the scalars of `_learn`, and lr.
        """
        c, updates = self._config, self._counts["updates"]
        phase = ""
        if self.augment is not None:
            self.augment.advance(batch.epoch, int(updates))
            phase = self.augment.phase
        self._rate.fill_(learning_rate(c, updates, self._per_epoch))
        self._share.fill_(1 - decay_after(updates, c.ema_decay))
        scalars = self._captured({name: batch.arrays[name] for name in (IMAGE, MASK)}, phase=phase)
        self._counts["updates"] += 1
        return {**scalars, "lr": self._rate.clone()}

    def _judge(self, score: float) -> None:
        """Note the score of an evaluation; `patience` of them without a better one end the run."""
        counts = self._counts
        if score > counts["best_score"]:
            counts |= {"best_score": score, "evaluations_since_best": 0}
        else:
            counts["evaluations_since_best"] += 1
        self._note_patience()

    def _note_patience(self) -> None:
        stale = self._counts["evaluations_since_best"]
        self.finished = 0 < self._config.patience <= stale

    @override
    def make_policy(self) -> NetworkPolicy:
        return self.POLICY(self.average, self._precision)

    @torch.no_grad()
    @override
    def publish(self, policy: Policy) -> None:
        assert isinstance(policy, NetworkPolicy)
        publish(self.average, policy.network)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._note_patience()
