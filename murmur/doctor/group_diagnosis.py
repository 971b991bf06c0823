"""Waits of learners that share a run: for rows, for one another, or for the exchange itself.

They take every update together, so all go at the pace of the slowest. A learner's time is either
spent waiting for rows, or on the work of updates, or in state wait_ranks: the exchange of gradients
and waiting for the others. The learner that is least in wait_ranks is the one that the others wait
for; what it spends there is the exchange itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from murmur.runs.snapshots import Snapshot
from murmur.shared.process.ledger import since

_WORK = ("sample", "forward", "backward", "optimize", "synchronize", "publish")
_WAITED_FOR = 0.1  # share of time by which the others wait more for a straggler than it for them
_NOTABLE = 0.1  # share of time that is worth a remedy
_BUSY = 0.85  # a learner that works or exchanges so much of its time sets the rate
_SLOWER = 1.15  # times the work of the others' updates


@dataclass(frozen=True)
class RankFigures:
    """Figures of one of the learners over a time window.

    Attributes:
        rank: number of the rank.
        environments: number of environments that play with it.
        rate: environment rows per second.
        waits_rows: share of its learning thread's time in which it waits for rows.
        waits_ranks: share of its learning thread's time in the exchange and in waits for the other
            learners.
        work_s: seconds of work in an update.
        updates: updates per second.
    """

    rank: int
    environments: int
    rate: float
    waits_rows: float
    waits_ranks: float
    work_s: float
    updates: float


def rank_figures(rank: int, before: Snapshot, after: Snapshot) -> RankFigures:
    """Return the figures of one learner between two snapshots of it."""
    thread = "learner" if "learner" in after.threads else "inference"  # the sync pipeline has one
    spent = since(before.threads, after.threads).get(thread, {})
    whole = max(sum(spent.values()), 1e-9)
    span = max(after.time - before.time, 1e-9)
    updates = after.updates - before.updates
    waits = "wait_rows" if thread == "learner" else "wait_environments"
    return RankFigures(
        rank,
        after.environments,
        (after.rows - before.rows) / span,
        spent.get(waits, 0.0) / whole,
        spent.get("wait_ranks", 0.0) / whole,
        sum(spent.get(state, 0.0) for state in _WORK) / max(updates, 1.0),
        updates / span,
    )


def pace_setter(ranks: Sequence[RankFigures]) -> RankFigures:
    """Return the learner that the others wait for, if any is."""
    return min(ranks, key=lambda r: r.waits_ranks)


def advice(ranks: Sequence[RankFigures]) -> list[str]:
    """Return lines on a straggler with its reason, and on which of three remedies would help.

    Another learner, more environment servers or a larger batch. Empty for a learner alone.
    """
    if len(ranks) < 2:
        return []
    return [line for line in (_straggler(ranks), *_remedies(ranks)) if line]


def _straggler(ranks: Sequence[RankFigures]) -> str:
    """Return text about the learner that the others wait for; empty if they wait for none."""
    slow = pace_setter(ranks)
    others = [r for r in ranks if r is not slow]
    waiting = median(r.waits_ranks for r in others) - slow.waits_ranks
    if waiting < _WAITED_FOR:
        return ""
    said = f"the others wait {100 * waiting:.0f} % of their time for rank {slow.rank}"
    theirs = median(r.work_s for r in others)
    longer = max(slow.work_s - theirs, 0.0) * slow.updates  # share of its time
    for_rows = slow.waits_rows - median(r.waits_rows for r in others)
    if for_rows >= max(longer, _NOTABLE / 2):
        usual = median(r.environments for r in others)
        if slow.environments < 0.9 * usual:
            why = (
                f"which has {slow.environments} environments, they {usual:.0f}. Sessions move by "
                "themselves; if it lasts, let their number be a multiple of the learners', and all "
                "servers name all learners"
            )
        else:
            why = "whose rows come late: its environment servers are slower, or too few"
    elif slow.work_s > _SLOWER * theirs:
        why = (
            f"whose updates take {1e3 * slow.work_s:.3g} ms of work, theirs {1e3 * theirs:.3g} ms: "
            "its device is slower, hotter or shared"
        )
    else:
        why = "which does something else meanwhile: a checkpoint, or a machine that is busy"
    return f"{said}, {why}"


def _remedies(ranks: Sequence[RankFigures]) -> list[str]:
    """Return lines on the gain of another learner, of environment servers and of a larger batch."""
    slow, number = pace_setter(ranks), len(ranks)
    exchange = slow.waits_ranks
    starved = sum(r.waits_rows for r in ranks) / number
    working = slow.work_s * slow.updates  # share of time
    lines = []
    if starved > _NOTABLE:
        more = 1 / max(1 - starved, 0.1)
        lines.append(
            f"more environment servers would help: all learners together could use {more:.1f} "
            "times the rows they get"
        )
    if working + exchange > _BUSY and exchange <= working:
        further = (working + exchange) / (working * number / (number + 1) + exchange)
        lines.append(
            f"another learner would help: {number + 1} instead of {number} are up to "
            f"{further:.2f} times as fast, where the work of an update follows its rows"
        )
    if exchange > _NOTABLE:
        larger = (working + exchange) / (working + exchange / 2)
        lines.append(
            f"a larger batch would help: the exchange takes {100 * exchange:.0f} % of the time; "
            f"updates of twice the rows would learn from {larger:.2f} times as many a second, and "
            "are half as many"
        )
    return lines or ["neither another learner nor a larger batch would help: see above"]
