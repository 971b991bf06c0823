"""Causes of a slow run: a table, each with a function of measured shares.

A cause's score is the share of the run's time that it takes on the side that sets the rate. In the
async pipeline that is the acting thread, the learning thread or the workers; in the sync pipeline
they take turns, and a side that becomes twice as fast saves half of its share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from murmur.doctor.measured import Measured, Workers
from murmur.text import number, percent

_NEARLY = 0.85  # busier than this, a thread sets the rate
_SHOWN = 0.05  # score of a cause that is worth a line beside the first two
_FEW, _MANY = 4.0, 16.0  # environments of a message: tiny, and large enough
_CALLS_S = 1e-3  # of a message on its way: calls and threads that wake up, on one machine, too


@dataclass(frozen=True)
class Finding:
    """A cause that was found.

    Attributes:
        name: name of the cause, a key of CAUSES.
        score: share of the run's time that it takes, 0 to 1.
        evidence: measurements behind it, as text; empty if there are none beyond the shares.
    """

    name: str
    score: float
    evidence: str = ""


@dataclass(frozen=True)
class Cause:
    """A row of the table.

    Attributes:
        words: name of the cause in a sentence that begins "waits for".
        measure: function that returns score and evidence; None: found by other code.
        advice: remedy as text, beside remedies with settings; empty if these suffice.
        cost: price of the advice.
    """

    words: str
    measure: Callable[[Measured], tuple[float, str]] | None = None
    advice: str = ""
    cost: str = ""


def side(m: Measured) -> str:
    """Return the side that sets an async run's rate: "learning", "acting" or "environments"."""
    if m.learn > _NEARLY or m.wait_learning > m.wait_environments:
        return "learning"
    return "acting" if m.act > _NEARLY else "environments"


def _weight(m: Measured, name: str) -> float:
    """Return the factor of a side's shares: those of the side that sets the rate fill the time."""
    if m.sync:
        return 0.5
    share = {"learning": m.learn, "acting": m.act, "environments": 1.0}[name]
    if side(m) == name:
        return max(1.0, 0.9 / max(share, 1e-9))
    return min(1.0, (_NEARLY - 0.01) / max(share, 1e-9))


def _in_steps(part: Callable[[Workers], float], how: str, m: Measured) -> tuple[float, str]:
    """Return the score of a part of the workers' time; `how` says what it is spent on."""
    if (w := m.workers) is None:
        return 0.0, ""
    workers = "the worker" if round(w.number) <= 1 else f"{round(w.number)} workers"
    return _weight(m, "environments") * part(w), (
        f"{percent(part(w))} of the time of {workers} is {how} "
        f"(state step {number(w.step_s)} s, CPU {number(w.cpu_s)} s)"
    )


def _environments(m: Measured) -> tuple[float, str]:
    if m.workers is not None:
        return 0.0, ""
    score = _weight(m, "environments") * m.wait_environments
    return max(score, 0.5) if not m.sync and side(m) == "environments" else score, ""


def _away(m: Measured, w: Workers) -> float:
    """Return the share of the time in which both sides wait for messages on their way."""
    if not m.sync:
        return min(w.away, m.wait_environments)
    # A worker waits while the learner works: only what acting waits for counts.
    share = max(0.0, m.wait_environments - w.busy)
    return min(w.away, share) if _several(w) else share


def _several(w: Workers) -> bool:
    """Return whether workers may wait for each other."""
    return w.number > 1.5


def _on_calls(m: Measured, w: Workers) -> float:
    """Return the part of `_away` that tiny messages cost wherever they go."""
    return _tiny(w) * min(_away(m, w), _CALLS_S * w.messages_per_s / w.number)


def _network(m: Measured) -> tuple[float, str]:
    if (w := m.workers) is None:
        return 0.0, ""
    share = _away(m, w) - _on_calls(m, w)
    each = w.number * share / max(w.messages_per_s, 1e-9)
    return _weight(m, "environments") * share, (
        f"both sides wait for each other {percent(share)} of the time: a message of "
        f"{number(w.rows_per_message)} environments and its answer are on their way for about "
        f"{number(1e3 * each)} ms"
    )


def _tiny(w: Workers) -> float:
    """Return how small messages are: 1 of at most _FEW environments, 0 of _MANY or more."""
    if not w.rows_per_message:
        return 0.0
    return min(1.0, max(0.0, (_MANY - w.rows_per_message) / (_MANY - _FEW)))


def _messages(m: Measured) -> tuple[float, str]:
    if m.workers is None:
        return 0.0, ""
    w = m.workers
    calls = 1.0 if m.act_computes is None else 1 - m.act_computes
    acting = _acts(m) * calls * _weight(m, "acting")
    of_worker = w.grpc + w.answer * calls + _on_calls(m, w)
    score = _tiny(w) * max(acting, of_worker * _weight(m, "environments"))
    return score, (
        f"{number(w.messages_per_s)} messages a second of {number(w.rows_per_message)} "
        f"environments each; a worker spends {percent(w.grpc)} of its time on them and waits "
        f"{percent(w.answer)} for their answers; acting is busy {percent(m.act)}"
    )


def _acting(m: Measured) -> tuple[float, str]:
    calls = 1.0 if m.act_computes is None else 1 - m.act_computes
    tiny = _tiny(m.workers) if m.workers else 0.0
    share = _acts(m) * calls * (1 - tiny)
    return _weight(m, "acting") * share, f"the inference thread works {percent(m.act)} of the time"


def _acts(m: Measured) -> float:
    """Return the share of the time in which the inference thread acts for training."""
    return max(0.0, m.act - m.act_lack - min(m.evaluate, m.act))


def _learns(m: Measured) -> float:
    """Return the share of the time in which the thread that learns has a processor and works."""
    return max(0.0, m.learn - m.learn_lack)


def _large_network(m: Measured) -> tuple[float, str]:
    learning = _learns(m) * (m.learn_computes or 0.0)
    acting = _acts(m) * (m.act_computes or 0.0)
    score = max(learning * _weight(m, "learning"), acting * _weight(m, "acting"))
    return score, (
        f"arithmetic, which grows with network and rows, takes {percent(learning)} of the time in "
        f"updates and {percent(acting)} in acting"
    )


def _small_batches(m: Measured) -> tuple[float, str]:
    if m.learn_computes is None:
        return 0.0, ""
    share = _learns(m) * (1 - m.learn_computes)
    each = f"; an update takes {number(1e3 * m.learn * m.span / m.updates)} ms" if m.updates else ""
    return _weight(m, "learning") * share, (
        f"calls, which cost the same for any number of rows, take {percent(share)} of the time in "
        f"updates{each}"
    )


def _learning(m: Measured) -> tuple[float, str]:
    share = _learns(m) * (m.learn_computes is None)
    if not m.sync and side(m) == "learning" and m.learn_computes is None:
        share = max(share, m.wait_learning)
    return _weight(m, "learning") * share, f"updates take {percent(m.learn)} of the time"


def environments_side_by_side(m: Measured) -> float:
    """Return the share of a sync run's time that environments would take beside the learner.

    In turns acting waits for the slowest worker; side by side a worker waits for no other.
    """
    if (w := m.workers) is None or not _several(w):
        return m.wait_environments
    return min(m.wait_environments, w.busy + w.away)


def _turns(m: Measured) -> tuple[float, str]:
    if not m.sync:
        return 0.0, ""
    environments = environments_side_by_side(m)
    parts = {"acting": m.act, "learning": m.learn, "environments": environments}
    taken = ", ".join(f"{name} {percent(share)}" for name, share in parts.items())
    idle = m.wait_environments - environments
    slowest = f", waiting for the slowest worker {percent(idle)}" if idle > _SHOWN else ""
    return 1 - max(parts.values()), f"in turns: {taken}{slowest} of the time"


def _others(m: Measured) -> tuple[float, str]:
    if m.machine is None:
        return 0.0, ""
    score = _lack(m) * m.machine.by_others
    return score, (
        f"others use {m.machine.others:.1f} of {m.machine.cores:g} cores, this run "
        f"{m.machine.own:.1f}; it is kept from running {percent(_lack(m))} of the time"
    )


def _processors(m: Measured) -> tuple[float, str]:
    if m.machine is None:
        return _of_machine(m)
    score = _lack(m) * (1 - m.machine.by_others) * m.machine.full
    return score, (
        f"this run uses {m.machine.own:.1f} of {m.machine.cores:g} cores, others "
        f"{m.machine.others:.1f}; it is kept from running {percent(_lack(m))} of the time"
    )


def _of_machine(m: Measured) -> tuple[float, str]:
    """Return the score of full processors of which not more is known."""
    if m.sync or side(m) != "environments" or (m.machine_busy or 0.0) <= 0.95:
        return 0.0, ""
    return 0.4, (
        f"programs use {percent(m.machine_busy or 0.0)} of the processors; how much of it is this "
        "run's, its servers' ledgers would say"
    )


def _lack(m: Measured) -> float:
    """Return the share of the time that the side that sets the rate has no processor."""
    lacks = [m.learn_lack * _weight(m, "learning"), m.act_lack * _weight(m, "acting")]
    if m.workers is not None:
        lacks.append(m.workers.lack * _weight(m, "environments"))
    return min(1.0, sum(lacks) if m.sync else max(lacks))


def _evaluation(m: Measured) -> tuple[float, str]:
    thread = m.evaluate * _weight(m, "acting")
    cores = 0.0
    if m.machine is not None and m.machine.full:  # it takes what the training lacks
        cores = (m.machine.evaluator + m.evaluate) / m.machine.cores
    taken = f", evaluators {m.machine.evaluator:.1f} cores" if m.machine else ""
    return max(thread, cores), (
        f"acting for evaluations takes {percent(m.evaluate)} of the time{taken}"
    )


CAUSES: Mapping[str, Cause] = {
    "environments wait": Cause(
        "environments that wait (sleep, network, subprocess): more workers",
        partial(_in_steps, lambda w: w.sleep, "in steps that use no processor"),
    ),
    "environments compute": Cause(
        "environments that compute: more cores or machines, or faster environments",
        partial(_in_steps, lambda w: w.compute, "computed in steps"),
        "step all copies in one call (docs/vectorised-environment.md), or start environment "
        "servers on other machines: `murmur env-server --set env_server.learner=HOST:PORT`",
        "nothing in learning, while updates take in all environments",
    ),
    "environments": Cause(
        "the environments: the learner waits for rows",
        _environments,
        "their servers' ledgers would say whether they compute or wait: name the servers' metrics "
        "ports after the learner's, or use --prometheus",
        "nothing",
    ),
    "servers": Cause(
        "the supply servers: the learner waits for samples",
        None,
        "where samples are read more than once, a cache helps more than servers do: see "
        "supply.cache, smaller images, more memory",
        "memory; smaller images show less",
    ),
    "network": Cause(
        "the way between environments and learner",
        _network,
        "more sessions (env_server.sessions_per_worker), of which some act while others are on "
        "their way; larger messages (env_server.envs_per_worker); servers nearer to the learner",
        "more environments act at once: shorter unrolls, or rows of more updates ago",
    ),
    "messages": Cause(
        "messages that are many and tiny",
        _messages,
        "raise env_server.envs_per_worker, so that envs_per_worker / sessions_per_worker is at "
        "least 16: a message costs the same whatever its size",
        "more environments act at once: shorter unrolls, or updates of more rows that are fewer",
    ),
    "acting": Cause(
        "acting: the inference thread is busy all the time",
        _acting,
        "answer more environments at once (env_server.envs_per_worker), use a smaller network, a "
        "faster device or lower precision",
        "a smaller network may learn less; more environments make unrolls shorter",
    ),
    "large network": Cause(
        "the network: its arithmetic takes the time",
        _large_network,
        "a smaller network, more torch threads (learner.num_threads) where cores are free, a "
        "faster device",
        "a smaller network may learn less",
    ),
    "small batches": Cause(
        "updates on small batches: calls take longer than arithmetic",
        _small_batches,
        "larger minibatches and fewer of them (algorithm.batch_size, batch_number)",
        "fewer steps of the weights: learns less per row",
    ),
    "learning": Cause(
        "learning: environments wait until the learner has caught up",
        _learning,
        "a faster device, a smaller network, more torch threads (learner.num_threads) where cores "
        "are free, or a second learner on a device of its own (docs/many-learners.md)",
        "a smaller network may learn less; two learners take updates of twice the rows",
    ),
    "turns": Cause(
        "the sync pipeline: environments, acting and learning wait for each other",
        _turns,
    ),
    "others": Cause(
        "processors that other programs use",
        _others,
        "end or move the other programs, or train on another machine",
        "nothing",
    ),
    "processors": Cause(
        "this machine's processors: the run's own processes take them from each other",
        _processors,
        "put the environment servers on other machines: `murmur env-server "
        "--set env_server.learner=HOST:PORT`; or fewer workers and torch threads",
        "nothing in learning",
    ),
    "evaluation": Cause(
        "evaluations, which take processors and acting from training",
        _evaluation,
        "evaluate less often (evaluation.every_updates) or fewer episodes (evaluation.episodes)",
        "nothing in learning; coarser curves, or wider intervals, and a best checkpoint that is "
        "chosen from fewer",
    ),
    # Found on a GPU, by murmur.doctor.gpu_waits.
    "kernels": Cause(
        "kernels so small that the device waits for the next one",
        None,
        "larger minibatches or more environments, a larger network at the same rate; CUDA graphs "
        "(learner.cuda_graph)",
        "larger minibatches are fewer updates: learns less per row unless rates rise with them",
    ),
    "shapes": Cause("updates run eagerly because shapes of their inputs change"),
    "captures": Cause("updates run eagerly because a CUDA graph could not be captured"),
    "eager": Cause("updates run eagerly: their kernels are launched one by one"),
    "eager acts": Cause("acting runs eagerly: its kernels are launched one by one"),
    "acts": Cause("acting waits for updates"),
}


def find(m: Measured) -> list[Finding]:
    """Return the causes found by shares, the largest first; at least one."""
    found = [
        Finding(name, min(1.0, score), evidence)
        for name, cause in CAUSES.items()
        if cause.measure is not None
        for score, evidence in [cause.measure(m)]
    ]
    found.sort(key=lambda finding: -finding.score)
    return [f for i, f in enumerate(found) if not i or f.score >= (_SHOWN if i > 1 else 0.005)]
