"""Checkpoints: written whole or not at all, rotated, read without pickle."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import torch

from shared.errors import CheckpointError
from shared.rpc import rollout_pb2 as pb
from shared.spec import EnvSpec, first_difference, spec_from_proto, spec_to_proto

FORMAT = 1
_NAME = re.compile(r"update-(\d+)\.pt")


class CheckpointFolder:
    """The checkpoints of one run: update-<n>.pt, the latest few, and best.pt."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        """Keep the latest `keep` checkpoints beside the best."""
        self._folder, self._keep = run_dir / "checkpoints", keep

    def save(self, state: dict[str, Any], updates: int) -> Path:
        """Write update-<n>.pt and delete the oldest beyond the limit.

        Raises:
            CheckpointError: if it cannot be written; earlier checkpoints are untouched.
        """
        path = self._folder / f"update-{updates:06d}.pt"
        self._write(state, path)
        for old in self._numbered()[: -self._keep]:
            old.unlink(missing_ok=True)
        return path

    def save_best(self, state: dict[str, Any]) -> Path:
        """Write best.pt."""
        path = self._folder / "best.pt"
        self._write(state, path)
        return path

    def save_batch(self, arrays: dict[str, Any], updates: int) -> Path:
        """Write a batch for inspection."""
        path = self._folder / f"batch-{updates:06d}.pt"
        self._write({"arrays": arrays}, path)
        return path

    def find(self, which: str) -> Path:
        """The file of "latest", "best", or a path.

        Raises:
            CheckpointError: if there is none.
        """
        if which == "latest":
            numbered = self._numbered()
            if not numbered:
                raise CheckpointError(
                    f"no checkpoint in {self._folder}; start without --resume, or name another run"
                )
            return numbered[-1]
        path = self._folder / "best.pt" if which == "best" else Path(which)
        if which == "best" and not path.is_file():
            return self.find("latest")
        if not path.is_file():
            raise CheckpointError(f"no checkpoint {path}; try 'latest'")
        return path

    def load(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            CheckpointError: if it is torn, foreign, or of another format.
        """
        try:
            # weights_only: tensors and plain values, never code.
            state: Any = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"cannot read checkpoint {path}: {reason}; pick another with --checkpoint"
            ) from None
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, dict) else type(state).__name__
            raise CheckpointError(f"{path} has format {found}, this murmur reads {FORMAT}")
        return state

    def load_latest(self) -> tuple[Path, dict[str, Any]]:
        """The newest checkpoint that can be read; torn ones are passed over.

        Raises:
            CheckpointError: if none can be read, with the newest one's reason.
        """
        first_error: CheckpointError | None = None
        for path in reversed(self._numbered()):
            try:
                return path, self.load(path)
            except CheckpointError as error:
                first_error = first_error or error
        raise first_error or CheckpointError(
            f"no checkpoint in {self._folder}; start without --resume, or name another run"
        )

    def _numbered(self) -> list[Path]:
        """update-<n>.pt, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [p for p in self._folder.iterdir() if _NAME.fullmatch(p.name)]
        return sorted(found, key=lambda p: int(_NAME.fullmatch(p.name)[1]))  # type: ignore[index]

    def _write(self, state: dict[str, Any], path: Path) -> None:
        """Write beside, flush to disk, rename: a reader sees the old file or the new one."""
        temporary = path.with_suffix(".tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save({"format": FORMAT, **state}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise CheckpointError(
                f"cannot write checkpoint {path}: {reason}; free some space or set run.directory "
                "elsewhere; earlier checkpoints are untouched"
            ) from None


def spec_text(spec: EnvSpec) -> str:
    """A spec as a checkpoint keeps it: hexadecimal, since weights_only reads no bytes."""
    return spec_to_proto(spec).SerializeToString(deterministic=True).hex()


def saved_spec(state: dict[str, Any]) -> EnvSpec:
    """The spec a checkpoint was made with."""
    return spec_from_proto(pb.EnvSpec.FromString(bytes.fromhex(state["spec"])))


def check_spec(path: Path, state: dict[str, Any], spec: EnvSpec) -> None:
    """Compare a checkpoint's spec with an environment's.

    Raises:
        CheckpointError: naming the first difference.
    """
    difference = first_difference(saved_spec(state), spec)
    if difference:
        raise CheckpointError(
            f"checkpoint {path} is of another environment: {difference}; "
            "use the configuration it was trained with, or start a new run"
        )
