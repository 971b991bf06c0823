"""Interface of a tracker's client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shared.config.experiment import TrackingConfig


@dataclass(frozen=True)
class Point:
    """Figures at one moment of a run.

    Attributes:
        time_s: time in seconds since 1970.
        env_steps: environment steps learned from, the x-axis of all curves.
        values: figures by name.
    """

    time_s: float
    env_steps: int
    values: Mapping[str, float]


class Sink(Protocol):
    """One run in a tracker. Any method may raise what its client raises.

    Attributes:
        where: an address, or a folder, at which people find the run.
        id_is_ours: whether the run has its id in every store; if not, the store gives it.
    """

    where: str
    id_is_ours: bool

    @staticmethod
    def store(run_dir: Path, config: TrackingConfig) -> str:
        """Name the store of the run's points; "" if an opened run holds none sent before."""
        ...

    def configure(self, parameters: Mapping[str, Any]) -> None:
        """Set hyper-parameters by dotted name; later values replace earlier ones."""

    def log(self, points: Sequence[Point]) -> None:
        """Add points to the curves."""

    def send_file(self, file: Path, env_steps: int) -> None:
        """Add a picture: .gif, .mp4 or .png."""

    def finish(self, summary: Mapping[str, float], *, complete: bool) -> None:
        """Write the final figures and close the run.

        Args:
            summary: figures by name.
            complete: whether the run ended in order, rather than by a crash.
        """
