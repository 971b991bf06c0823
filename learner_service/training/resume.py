"""What a learner does when it continues a run: random numbers, counters, past opponents."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from learner_service.algorithms.base import Policy
from learner_service.checkpoint import saved_policy
from learner_service.runtime.device import restore_generator
from learner_service.runtime.precision import Precision
from learner_service.serving.league import check_opponent
from learner_service.telemetry.metrics import LearnerMetrics
from learner_service.telemetry.progress import Progress
from shared.process import logger
from shared.spec import EnvSpec


def resume_generator(generator: torch.Generator, saved: Any, serve_only: bool) -> None:  # noqa: ANN401
    """Continue the random numbers of a checkpoint; warn where that is impossible."""
    if not restore_generator(generator, saved) and not serve_only:
        logger.warning(
            "the checkpoint was saved on another kind of device: random numbers continue from "
            "the seed, so this run differs from one that continued there"
        )


def warn_of_changed_plugins(
    before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> None:
    """Say which plug-ins are not what they were when a checkpoint was written.

    Args:
        before: files of plug-ins then, see `plugin_files`; empty in older checkpoints.
        now: the same of this process.
    """
    for module, found in now.items():
        then = before.get(module)
        if then is not None and then.get("sha256") != found["sha256"]:
            logger.warning(
                "plug-in %s has changed since the checkpoint was written: the run continues with "
                "what the file says now",
                found["file"],
            )


def settle_metrics(m: LearnerMetrics, p: Progress, held: int) -> None:
    """Count what went with a process that was killed: the rows it held, its last updates.

    The metrics know every row that ever came, the progress those up to the checkpoint. A
    learner that was killed before its first checkpoint had saved nothing.

    Args:
        m: the metrics, with the counters that outlive the process.
        p: progress of the checkpoint.
        held: rows that the storage holds.
    """
    replay = p.rows_inserted or m.total("rows_inserted")
    learned = "rows_inserted" if replay else "rows_trained"
    if not m.total("rows_received"):  # an older murmur kept none
        m.counter("rows_received").inc(p.rows_received)
        m.counter(learned).inc(p.rows_settled)
        for reason, rows in p.rows_dropped.items():
            m.counter("rows_dropped", reason=reason).inc(rows)
    undone = m.total(learned) - p.rows_settled - m.total("rows_undone")
    m.counter("rows_undone").inc(max(0, undone))
    lost = m.total("rows_received") - m.total(learned) - m.total("rows_dropped") - held
    m.counter("rows_dropped", reason="restart").inc(max(0, lost))


def opponent_policy(
    path: Path, state: dict[str, Any], spec: EnvSpec, precision: Precision, device: torch.device
) -> Policy:
    """The policy of a checkpoint to play against.

    Raises:
        MurmurError: if it is of another environment, or this murmur cannot build it.
    """
    check_opponent(path, state, spec)
    policy, _ = saved_policy(str(path), state, precision, device)
    return policy
