"""skeleton.py: REINFORCE makes every action more likely by the return that followed it.

Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement
learning" (doi:10.1007/BF00992696).
"""

import torch
from pydantic import Field
from torch import Tensor

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.actor import ActorAlgorithm
from murmur.learner_service.learning.base import AlgorithmConfig
from murmur.learner_service.learning.returns import lambda_returns
from murmur.learner_service.storage.rollout import Batch, transitions
from murmur.shared.config import PluginConfig
from murmur.shared.wire.spec import EnvSpec


class Skeleton(ActorAlgorithm):
    """REINFORCE with returns normalized over the update."""

    class Config(AlgorithmConfig):
        """Options that a configuration sets beside the algorithm's name."""

        batch_rows: int = Field(4096, ge=1, description="agent-transitions of an update")
        gamma: float = Field(0.95, ge=0, le=1, description="discount factor")
        lr: float = Field(3e-3, gt=0, description="Adam's learning rate")
        entropy_weight: float = Field(0.01, ge=0, description="weight of the entropy, per nat")
        max_grad_norm: float = Field(1.0, ge=0, description="gradient norm is clipped; 0: never")

    def __init__(
        self,
        config: Config,
        spec: EnvSpec,
        network: PluginConfig,
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        """Build the actor and its optimizer."""
        super().__init__(spec, network, precision, device, seed)
        self.config = config
        self.rows_per_update = config.batch_rows
        self.unroll_length = 2 * (spec.max_episode_steps or 64)  # holds a whole episode
        self.optimizer = torch.optim.Adam(self.actor.parameters(), config.lr)
        self.keep(optimizer=self.optimizer)  # in checkpoints

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Take one step along the policy gradient; return scalars for the logs."""
        c, t = self.config, transitions(batch)
        # 1. Returns G_t = r_{t+1} + gamma G_{t+1} of episodes that end within the unroll.
        zero = torch.zeros_like(t.reward)
        returns = lambda_returns(t.reward, t.discount, zero, t.next_is_last, c.gamma, 1.0)
        ends = t.next_is_last.int().flip(0).cummax(0).values.flip(0)  # [L, B]
        weight = self.weights(batch) * ends.unsqueeze(-1)  # [L, B, A]
        weight = weight / weight.sum().clamp_min(1)
        # 2. Advantages: returns less their mean, in units of their deviation.
        mean = (returns * weight).sum()
        std = ((returns - mean).square() * weight).sum().sqrt()
        advantage = (returns - mean) / (std + 1e-6)
        # 3. The gradient of E[log pi(a) A], and a little of the entropy's.
        log_prob, entropy = self.evaluate(batch)  # [L, B, A]
        loss = -(weight * (log_prob * advantage + c.entropy_weight * entropy)).sum()
        norm = self.step(loss, self.optimizer, c.max_grad_norm)
        entropy = (entropy.detach() * weight).sum()
        return {"loss": loss.detach(), "entropy": entropy, "return_mean": mean, "grad_norm": norm}
