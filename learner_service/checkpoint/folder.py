"""The checkpoints of a run: saved, rotated, and the newest whole one found.

A replay is too large to rewrite each time. It is saved separately, in chunks, of which only those
that changed are written; update-<n>.json names the chunks that belong to update-<n>.pt.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from murmur.learner_service.checkpoint import files
from murmur.learner_service.checkpoint.contents import saved_sections
from murmur.learner_service.checkpoint.files import chunk_files, chunks_of
from murmur.learner_service.checkpoint.parts import adopted, merged, own_part, prefix
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.storage.storage import SavedPart, Storage
from murmur.learner_service.telemetry.persistent_counters import PersistentCounters
from murmur.shared.process.checkpoints import (
    find_checkpoint,
    numbered_checkpoints,
    updates_of,
)
from murmur.shared.process.errors import CheckpointError, ConfigError
from murmur.shared.process.process import logger

T = TypeVar("T")
_OF_RANK = re.compile(r"rank(\d+)-")


class CheckpointFolder:
    """The checkpoints of one run: update-<n>.pt, the latest few, best.pt, and league-<n>.pt.

    Attributes:
        path: the folder.
    """

    def __init__(self, run_dir: Path, keep: int, group: Group = ALONE) -> None:
        """Keep the latest `keep` checkpoints beside the best; see checkpoint.parts for groups."""
        self.path = run_dir / "checkpoints"
        self._keep = keep
        self._group = group
        self._prefix = prefix(group.rank)
        self._chunks: dict[str, str] = {}  # number -> file of the storage's chunks as last saved
        self._pending: dict[int, Callable[[], dict[str, Any]]] = {}  # chunks to be written

    def save(
        self, state: dict[str, Any], updates: int, storage: Storage[Any] | None = None
    ) -> Path:
        """Write update-<n>.pt and what changed of the storage; delete what is beyond the limit.

        All ranks of a group call this; the checkpoint counts once rank 0 has written its file.

        Raises:
            CheckpointError: if it cannot be written, by any rank; earlier checkpoints are
                untouched.
        """
        group = self._group
        path = self.path / f"{self._prefix}update-{updates:06d}.pt"
        if group.size > 1:
            mark = group.of_rank_0(secrets.randbits(48))
            state = {**state, "world_size": group.size, "mark": mark}
        manifest = self._together(lambda: self._save_own(state, path, storage))
        if group.size > 1:
            self._together(lambda: None if group.rank else files.write(manifest, path))
        self._rotate()
        return path

    def _together(self, act: Callable[[], T]) -> T:
        """Write or read on all ranks, each of which learns whether all could.

        Raises:
            CheckpointError: if one of them cannot.
        """
        try:
            done = act()
        except CheckpointError:
            self._group.all_ranks(False)
            raise
        if not self._group.all_ranks(True):
            raise CheckpointError(
                "another rank has no part of this checkpoint, so it does not count; see that "
                "rank's log"
            )
        return done

    def _save_own(
        self, state: dict[str, Any], path: Path, storage: Storage[Any] | None
    ) -> dict[str, Any]:
        """Write what is this rank's: all, of one that is alone; of rank 0 all but its manifest.

        Returns:
            the whole state, the manifest that rank 0 of several writes last.
        """
        if storage is not None:
            state = {**state, "storage": storage.state_dict()}
            self._pending |= storage.chunks()
        for number, chunk in list(self._pending.items()):
            file = f"{self._prefix}replay-{number:05d}-{path.stem.rpartition('-')[2]}.pt"
            files.write({"arrays": chunk()}, self.path / file)
            self._chunks[str(number)] = file
            del self._pending[number]
        if self._chunks:
            files.write_bytes([json.dumps(self._chunks).encode()], path.with_suffix(".json"))
        state = {**state, "chunks": dict(self._chunks)}
        if self._group.size == 1:
            files.write(state, path)
        elif self._group.rank:
            files.write(own_part(state), path)
        return state

    def _rotate(self) -> None:
        """Delete the oldest checkpoints, and parts and chunks that none of the rest names."""
        group = self._group
        ranks = {group.rank}
        if group.rank == 0:
            for old in numbered_checkpoints(self.path)[: -self._keep]:
                old.unlink(missing_ok=True)
                old.with_suffix(".json").unlink(missing_ok=True)
            # Only this removes what former ranks have left.
            found = [_OF_RANK.match(path.name) for path in self.path.iterdir()]
            ranks |= {int(match[1]) for match in found if match and int(match[1]) >= group.size}
        for rank in ranks:
            self._rotate_rank(prefix(rank))

    def _rotate_rank(self, of_rank: str) -> None:
        """The same for one rank's files, whose names begin with `of_rank`."""
        for left in self.path.glob("*.tmp"):  # by a process that was killed
            match = _OF_RANK.match(left.name)
            # Not those that another thread, or rank, is writing.
            if (match[0] if match else "") == of_rank and files.WRITER not in left.name:
                left.unlink(missing_ok=True)
        # Rank 0 may not have deleted the others yet.
        manifests = numbered_checkpoints(self.path)[-self._keep :]
        parts = [self.path / f"{of_rank}{path.name}" for path in manifests]
        if of_rank:
            for part in self.path.glob(f"{of_rank}update-*.pt"):
                if part not in parts:
                    part.unlink(missing_ok=True)
                    part.with_suffix(".json").unlink(missing_ok=True)
        try:
            named = {f for part in parts for f in chunk_files(part).values()}
        except CheckpointError as error:
            logger.warning("%s; no part of a replay is deleted", error)
            return
        for file in self.path.glob(f"{of_rank}replay-*.pt"):
            if file.name not in named:
                file.unlink(missing_ok=True)

    def load_storage(self, path: Path, state: dict[str, Any], storage: Storage[Any]) -> bool:
        """Give a storage back what was saved with a checkpoint.

        Returns:
            False if the checkpoint holds none, as best.pt.

        Raises:
            CheckpointError: if a part is missing or torn.
            ConfigError: if the storage has another size now.
        """
        if "saved_parts" in state:  # of another number of learners
            saved = [
                SavedPart(
                    rank,
                    part["storage"],
                    {int(n): partial(self._chunk, file) for n, file in part["chunks"].items()},
                )
                for rank, part in enumerate(state["saved_parts"])
                if part.get("storage") is not None
            ]
            if saved:
                storage.load_parts(saved, self._group.rank, self._group.size)
            return bool(saved)
        kept = state.get("storage")
        if kept is None:
            logger.warning("%s holds no replay: it starts as that of a new run", path)
            return False
        storage.load_state_dict(kept)
        self._chunks = chunks_of(path, state)
        for number, file in self._chunks.items():
            storage.load_chunk(int(number), self._chunk(file))
        return True

    def _chunk(self, file: str) -> dict[str, Any]:
        """Arrays of a chunk."""
        arrays: dict[str, Any] = self.load(self.path / file)["arrays"]
        return arrays

    def save_best(self, state: dict[str, Any]) -> Path:
        """Write best.pt.

        Raises:
            CheckpointError: if it cannot be written; the one before is untouched.
        """
        path = self.path / "best.pt"
        files.write(state, path)
        return path

    def best_score(self, metric: str) -> float | None:
        """Return the score of best.pt; None if there is none to beat, or another metric chose it.

        The file says, not the checkpoint that a run continues from: it may have been written later.
        """
        path = self.path / "best.pt"
        if not path.is_file():
            return None
        try:
            state = self.load(path)
        except CheckpointError as error:
            logger.warning("%s; the next evaluation writes another", error)
            return None
        chosen_by = saved_sections(state, path.name)["evaluation"]["best_metric"]
        score: float | None = state["best"] if chosen_by == metric else None
        return score

    def save_opponent(self, state: dict[str, Any], updates: int) -> Path:
        """Write league-<n>.pt, a policy that the run will play against. All ranks call this.

        Raises:
            CheckpointError: if it cannot be written.
        """
        path = self.path / f"league-{updates:06d}.pt"
        self._together(lambda: None if self._group.rank else files.write(state, path))
        return path

    def save_batch(self, arrays: dict[str, Any], updates: int) -> Path:
        """Write a batch for inspection."""
        path = self.path / f"{self._prefix}batch-{updates:06d}.pt"
        files.write({"arrays": arrays}, path)
        return path

    def has_checkpoint(self) -> bool:
        """Whether a run could continue from here."""
        return bool(numbered_checkpoints(self.path))

    def require_no_run(self) -> None:
        """Check that a new run may begin here: its checkpoints would mix with an earlier run's.

        Raises:
            ConfigError: if a run was begun in this folder.
        """
        run_dir = self.path.parent
        counts = (
            PersistentCounters(run_dir / "counters.bin").items()
            if self._has("counters.bin")
            else {}
        )
        if numbered := numbered_checkpoints(self.path):
            how = f"add --resume to continue it from {numbered[-1].name}"
        elif self._has("progress.jsonl") or any(self.path.glob("*.pt")) or any(counts.values()):
            how = "it has no checkpoint for --resume; --auto-resume starts it over in this folder"
        else:
            return
        raise ConfigError(
            f"run folder {run_dir} already holds a run: {how}, or name another folder with --run"
        )

    def _has(self, name: str) -> bool:
        """Whether a file of the run is there and not empty."""
        path = self.path.parent / name
        return path.is_file() and path.stat().st_size > 0

    def find(self, which: str) -> Path:
        """The file of "latest", "best", or a path.

        Raises:
            CheckpointError: if there is none.
        """
        return find_checkpoint(self.path, which)

    def load(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            CheckpointError: if it is torn, foreign, or of another format.
        """
        return files.load(path)

    def load_latest(self) -> tuple[Path, dict[str, Any]]:
        """The newest checkpoint that is whole, and all files that belong to it.

        All ranks of a group call this. Those passed over are renamed to .refused: they are newer,
        and would be kept in place of those that the run is about to write.

        Raises:
            CheckpointError: if none can be read, with the newest one's reason.
        """
        refused: list[tuple[Path, CheckpointError]] = []
        for path in self._candidates():
            try:
                state = self._together(partial(self._load_whole, path))
            except CheckpointError as error:
                refused.append((path, error))
                continue
            for bad, reason in refused:
                logger.warning("%s; the run continues from %s", reason, path.name)
                if self._group.rank == 0:
                    bad.replace(bad.with_suffix(".refused"))
            return path, state
        if refused:
            raise refused[0][1]
        raise CheckpointError(
            f"no checkpoint in {self.path}; start without --resume, or name another run"
        )

    def _candidates(self) -> Iterator[Path]:
        """Checkpoints, newest first, as rank 0 finds them."""
        found = [updates_of(path) for path in reversed(numbered_checkpoints(self.path))]
        for at in range(self._group.of_rank_0(len(found))):
            updates = self._group.of_rank_0(found[at] if self._group.rank == 0 else 0)
            yield self.path / f"update-{updates:06d}.pt"

    def _load_whole(self, path: Path) -> dict[str, Any]:
        """Return the state that this rank continues from, after verifying all files it needs."""
        manifest = self.load(path)
        then, group = manifest.get("world_size", 1), self._group
        same = then == group.size
        parts = [manifest]
        for rank in range(1, then):
            if same and rank != group.rank:
                parts.append({})  # another rank reads it
                continue
            file = self.path / f"{prefix(rank)}{path.name}"
            parts.append(self.load(file))
            if parts[-1].get("mark") != manifest.get("mark"):
                raise CheckpointError(f"{file} belongs to another checkpoint than its manifest")
        mine = [group.rank] if same else adopted(group.rank, group.size, then)
        for rank in mine:
            part_path = self.path / f"{prefix(rank)}{path.name}"
            for name in chunks_of(part_path, parts[rank]).values():
                files.verified(self.path / name, signed="chunks" in parts[rank])
        if then == group.size == 1:
            return manifest
        state = merged(parts, group.rank, group.size)
        if not same:
            state["saved_parts"] = [
                {"storage": part.get("storage"), "chunks": part.get("chunks", {})} for part in parts
            ]
        return state
