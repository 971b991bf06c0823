"""Two learners on two cores against one on one core: what does learning together cost?

Updates: two processes, each pinned to a core, make the same updates without any exchange, in
lockstep (they exchange one number an update), and as two ranks with gloo's all-reduce, in turns.
Lockstep is the bound: it costs what two cores of a shared machine differ by. Each rank has as many
rows as a process alone, so without a cost the rates were equal. An exchange takes some 0.8 ms of
each rank's processor for a megabyte of gradients; the targets are for updates that compute much
longer, such as MASAC's with 2048 rows. COMA's networks are large for its minibatches, and MASAC's
256 rows are few.

Messages: a run with one learner, its environment server on the same core, against a run of two
learners, each with its environment server on a core of its own, in turns: environment servers that
do not play are paused. One environment a message, an update every 800 rows of each rank. Every core
has the same work in both runs, so what bounds is the core, which `cores in use` shows, and an
environment server's share of it is the same too. `snakes-ddpg` in the same way, with the published
hyper-parameters: each rank updates once a row, with 64 rows; a message carries four games.
"""

import statistics
from typing import Any

import psutil

from benchmarks import _rank_messages
from benchmarks._cores import CAN_PIN, two_cores
from benchmarks._rank_updates import APART, LOADS, SMOKE, Pair, compare
from murmur.benchmarks.effort import Effort

DESCRIPTION = (
    "two ranks on two cores: rate against two processes without exchange (target ≥ 0.93), share of "
    "the all-reduce (≤ 5 %), messages/s against one learner on one core (≥ 1.8 times)"
)


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure updates by load, with and without exchange; messages per second by learners."""
    cores = two_cores()
    loads = SMOKE if effort is Effort.SMOKE else LOADS
    turns = effort.choose(1, 3, 11)
    result: dict[str, Any] = {"updates": {}}
    with Pair(loads, cores) as pair:
        for name in loads:
            result["updates"][name] = compare(pair, name, turns, updates_of(pair, name, effort))
    if effort is not Effort.SMOKE:  # three learners to start for each
        windows, seconds = effort.choose((1, 0.5), (3, 2.0), (11, 4.0))
        runs = {
            "messages": _rank_messages.one_environment_a_message,
            "snakes-ddpg": _rank_messages.snakes_ddpg,
        }
        for name, content in runs.items():
            result[name] = _rank_messages.compare(content, cores, windows, seconds)
    result["pinned"] = CAN_PIN
    result["load_average"] = psutil.getloadavg()[0]
    return result


def updates_of(pair: Pair, load: str, effort: Effort) -> int:
    """Return the number of updates that take about four seconds, one second if effort is quick."""
    if effort is Effort.SMOKE:
        return 2
    once = statistics.median(pair.measure(load, APART, 1)[0].wall_s for _ in range(3))
    wanted: float = effort.choose(0.0, 1.0, 4.0)
    return max(1, round(wanted / once))
