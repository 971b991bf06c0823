"""The memory of a replay: how many columns fit, and their arrays."""

import math
from collections.abc import Mapping

import torch

from learner_service.runtime.memory import count, require_room, room
from learner_service.storage.frames import Frames
from learner_service.storage.replay_config import ReplayConfig
from learner_service.storage.storage import OBSERVATION, row_layout
from shared.errors import ConfigError, ResourceError
from shared.spec import EnvSpec

_SHARE = 0.8  # of what is free


class ReplayMemory:
    """Memory set aside for the ring of a replay.

    Attributes:
        arrays: name -> [columns, rows, ...].
        columns: number of unrolls of one environment that it holds.
        bytes: of one column.
        stacked: names of images that are stacked.
        previous: earlier frames kept before a column's rows.
    """

    def __init__(
        self,
        config: ReplayConfig,
        spec: EnvSpec,
        device: torch.device,
        extras: Mapping[str, tuple[int, ...]],
        memory_size: int,
        section: str,
        frames: Frames | None,
    ) -> None:
        """Set the memory aside; the arguments are those of ReplayStorage.

        Raises:
            ConfigError: if the options contradict each other.
            ResourceError: if the device has not the memory.
            SpecError: if it has it for the ring, but not for a batch beside it.
        """
        length = config.unroll_steps
        layout = row_layout(spec, extras)
        # Names of images that are stacked, and the previous frames before a column's rows.
        self.stacked = [OBSERVATION + image.name for image in frames.images] if frames else []
        self.previous = frames.depth - 1 if frames else 0
        rows = {name: length + 1 + self.previous * (name in self.stacked) for name in layout}
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in layout.items()}
        remembered = 1, spec.num_agents, memory_size  # of each column's first row
        self.bytes = sum(rows[name] * size for name, size in sizes.items())
        self.bytes += 4 * math.prod(remembered)
        drawn = sum(
            # A row's stacks, and those of the row that follows.
            size * (1 + self.previous * (name in self.stacked)) * (1 + name.startswith(OBSERVATION))
            for name, size in sizes.items()
        )
        self.columns = self._fit(config, section, drawn, device)
        shapes = {name: ((rows[name], *shape), dtype) for name, (shape, dtype) in layout.items()}
        if memory_size:
            shapes["memory"] = remembered, torch.float32
        self.arrays = {
            name: torch.zeros((self.columns, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }

    def _fit(self, c: ReplayConfig, section: str, drawn: int, device: torch.device) -> int:
        """Columns of the ring; refuses a size that is too small or does not fit.

        Args:
            c: the replay's options.
            section: their dotted name.
            drawn: bytes of a row in a batch.
            device: where rows live.
        """
        columns = -(-c.capacity_rows // c.unroll_steps)
        if c.capacity_bytes:
            columns = min(columns, c.capacity_bytes // self.bytes)
        rows = columns * c.unroll_steps
        for name, wanted in (("start_rows", c.start_rows), ("batch_size", c.batch_size)):
            if rows < wanted:
                raise ConfigError(
                    f"the replay has room for {rows} rows, fewer than {section}.{name}="
                    f"{wanted}; raise capacity_rows or capacity_bytes, or lower {name}"
                )
        free = room(device)
        need = columns * self.bytes
        if need > free * _SHARE:
            possible = int(free * _SHARE) // self.bytes * c.unroll_steps
            raise ResourceError(
                f"a replay of {rows:,} rows takes {need / 2**30:.1f} GiB, more than {_SHARE:.0%} "
                f"of the {free / 2**30:.1f} GiB that {device} has free; set "
                f"{section}.capacity_rows to at most {possible}"
            )
        count(need)
        # A graph gathers a batch and copies it, and the last one is learned from meanwhile.
        batches = 2 + c.prefetch if device.type == "cuda" else 1
        require_room(
            c.batch_size * drawn * batches,
            f"a batch of {c.batch_size:,} rows drawn from the replay, each of "
            f"{drawn:,} bytes with its next observations,",
            f"lower {section}.batch_size, or observe less (environment.resize, gray)",
            device,
        )
        return columns
