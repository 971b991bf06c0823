"""Notes the samples of every batch in a file; its weight depends on all of them in order."""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Policy
from murmur.learner_service.learning.supervised import Supervised, SupervisedConfig
from murmur.learner_service.storage.samples import SampleBatch
from murmur.shared.config import PluginConfig
from murmur.shared.wire.samples import SampleSpec

SUPERVISED = True


class Config(SupervisedConfig):
    """Options of `counting`.

    Attributes:
        log: file of JSON lines, one for each update.
        pause_s: what an update takes.
    """

    log: str
    pause_s: float = 0.0


class Still(Policy):
    """Does nothing."""

    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """See Policy."""
        return {}


class Counting(Supervised):
    """See the module."""

    metrics = ("checksum",)

    def __init__(
        self,
        config: Config,
        spec: SampleSpec,
        network: PluginConfig,
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        super().__init__(precision, device, seed)
        self._log, self._pause_s = Path(config.log), config.pause_s
        self.network = nn.Linear(1, 1, bias=False).to(device)
        nn.init.zeros_(self.network.weight)
        self._parts["network"] = self.network
        self._counts = {"updates": 0}

    @torch.no_grad()
    def update(self, batch: SampleBatch) -> dict[str, Tensor]:
        """Note the batch; weight = 0.9 weight + a mean that depends on the order of its samples."""
        time.sleep(self._pause_s)
        line = {
            "update": self._counts["updates"],
            "epoch": batch.epoch,
            "index": batch.index.tolist(),
            "begins": batch.begins_epoch,
            "ends": batch.ends_epoch,
        }
        with self._log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        image = batch.arrays["image"].float().mean((1, 2, 3))
        assert image.tolist() == [index % 251 for index in line["index"]], "another sample's image"
        order = torch.linspace(0, 1, len(image))
        self.network.weight.mul_(0.9).add_((image * order).mean() / 251)
        self._counts["updates"] += 1
        return {"loss": self.network.weight.sum()}

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """The sum of all masks."""
        return {"checksum": float(sum(int(mask.sum()) for _, mask in batches))}

    def make_policy(self) -> Policy:
        """See Algorithm."""
        return Still()

    def publish(self, policy: Policy) -> None:
        """See Algorithm."""


build = Counting
