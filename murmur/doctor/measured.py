"""Shares of time between two snapshots of a run: of its threads, its workers and its machine."""

from collections.abc import Mapping
from dataclasses import dataclass

from murmur.doctor.latency import middles
from murmur.runs.snapshots import Snapshot
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.ledger import since

WAITS = {
    "inference": ("wait_environments", "wait_learning", "start"),
    "learner": ("wait_rows", "start"),
}
_STEPS = ("forward", "backward", "optimize", "synchronize")  # on minibatches
LEARNING = (
    *("sample", *_STEPS, "publish", "wait_rows"),
    "wait_ranks",  # of one of several learners: its exchange with the others is part of an update
)
# CPU seconds of the calls of an act, and of a step on a minibatch, whatever their rows.
_ACT_CALLS_S, _STEP_CALLS_S = 1e-3, 5e-3


@dataclass(frozen=True)
class Machine:
    """Use of the processors of the learner's machine, in processors.

    Attributes:
        cores: number of processors that the learner may use.
        busy: processors in use by any program.
        own: those in use by the run's processes.
        evaluator: those of them in use by evaluators.
        lacking: processors that the run's threads were ready to use and did not get.
    """

    cores: float
    busy: float
    own: float
    evaluator: float = 0.0
    lacking: float = 0.0

    @property
    def others(self) -> float:
        """Processors in use by programs that are not the run's."""
        return max(0.0, self.busy - self.own)

    @property
    def full(self) -> bool:
        """Whether hardly any processor is free."""
        return self.busy > 0.9 * self.cores

    @property
    def by_others(self) -> float:
        """Share of the lack that exists because of other programs.

        The run alone would lack only what it asks for beyond all processors.
        """
        if self.others < 0.05 * self.cores or not self.lacking:
            return 0.0
        return 1 - min(1.0, max(0.0, self.own + self.lacking - self.cores) / self.lacking)


@dataclass(frozen=True)
class Workers:
    """Shares of the time of all workers of the environment servers; together at most 1.

    Attributes:
        number: number of workers.
        sleep: share in which environments step but use no processor: sleep, network, subprocess.
        compute: share in which environments compute, packing included.
        grpc: share in which a worker's processor works on messages.
        lack: share in which a worker was ready to run and had no processor.
        answer: share in which a worker waits for acting, the time without a processor left out.
        away: share in which messages are on their way: neither side works on them.
        step_s: seconds in state step.
        cpu_s: CPU seconds.
        rows_per_message: environments of a message.
        messages_per_s: messages a second.
    """

    number: float
    sleep: float
    compute: float
    grpc: float
    lack: float
    answer: float
    away: float
    step_s: float
    cpu_s: float
    rows_per_message: float
    messages_per_s: float

    @property
    def busy(self) -> float:
        """Share in which a worker steps, works on messages or lacks a processor for it."""
        return self.sleep + self.compute + self.grpc + self.lack


@dataclass(frozen=True)
class Measured:
    """Measurements of a run over a window.

    Attributes:
        span: length of the window [s].
        rows: environment rows, or samples, that came.
        sync: True if acting and learning take turns.
        act, learn: shares of the time in which the run acts and learns.
        evaluate: share of the acting or learning time that goes to evaluations.
        wait_environments: share in which acting waits for environments.
        wait_learning: share in which sessions wait for learning.
        act_lack, learn_lack: parts of `act` and `learn` without a processor.
        act_computes, learn_computes: parts of `act` and `learn` that grow with the network and the
            rows, the rest is calls; None: unknown.
        workers: shares of the workers; None: unknown.
        machine: use of the processors; None: unknown.
        machine_busy: share of the processors in use by any program; None: unknown.
        updates: updates made.
    """

    span: float
    rows: float
    sync: bool
    act: float
    learn: float
    evaluate: float
    wait_environments: float
    wait_learning: float
    updates: float
    act_lack: float = 0.0
    learn_lack: float = 0.0
    act_computes: float | None = None
    learn_computes: float | None = None
    workers: Workers | None = None
    machine: Machine | None = None
    machine_busy: float | None = None


def steps_per_row(config: ExperimentConfig, agents: int) -> float | None:
    """Return steps on minibatches for each row that updates take; None if unknown.

    Args:
        config: configuration of the run, with the options that it resolved to.
        agents: number of agents of an environment.
    """
    options = config.algorithm.options
    if size := options.get("replay", {}).get("batch_size", 0):  # joint transitions
        return 1 / float(size)
    size = options.get("batch_size", 0)
    return agents * options.get("data_passes", 1) / float(size) if size and agents else None


def measure(before: Snapshot, after: Snapshot, steps: float | None = None) -> Measured:
    """Return the measurements between two snapshots.

    Args:
        before: earlier snapshot.
        after: later snapshot; some rows came in between.
        steps: result of `steps_per_row`.
    """
    span = after.time - before.time
    states = since(before.threads, after.threads)
    sync = "learner" not in states
    act_s, learn_s = working(states, sync)
    inference, learner = states.get("inference", {}), states.get("learner", {})
    evaluate = inference.get("evaluate", 0.0) + learner.get("evaluate", 0.0)
    cpu, lack = (
        {name: max(0.0, total - old.get(name, 0.0)) for name, total in new.items()}
        for old, new in ((before.cpu_s, after.cpu_s), (before.cpu_wait_s, after.cpu_wait_s))
    )
    if sync:  # one thread does both
        both = max(act_s + learn_s, 1e-9)
        for of in (cpu, lack):
            of["learner"] = of.get("inference", 0.0) * learn_s / both
            of["inference"] = of.get("inference", 0.0) * act_s / both
    # A call costs the same for any number of rows; what takes longer than calls is arithmetic.
    batches, rows = after.batches - before.batches, after.rows - before.rows
    act_cpu = cpu.get("inference", 0.0) * inference.get("act", 0.0) / max(act_s, 1e-9)
    made = (after.rows_trained - before.rows_trained) * (steps or 0.0)
    act_computes = _arithmetic(batches * _ACT_CALLS_S, act_cpu, cpu.get("inference", 0.0))
    learning = inference if sync else learner
    steps_s = sum(learning.get(state, 0.0) for state in _STEPS)
    steps_cpu = cpu.get("learner", 0.0) * steps_s / max(learn_s, 1e-9)
    learn_computes = _arithmetic(made * _STEP_CALLS_S, steps_cpu, cpu.get("learner", 0.0))
    return Measured(
        span,
        rows,
        sync,
        act_s / span,
        learn_s / span,
        evaluate / span,
        inference.get("wait_environments", 0.0) / span,
        inference.get("wait_learning", 0.0) / span,
        after.updates - before.updates,
        min(act_s, lack.get("inference", 0.0)) / span,
        min(learn_s, lack.get("learner", 0.0)) / span,
        act_computes,
        learn_computes,
        _workers(before, after, inference, act_s, lack),
        _machine(before, after, cpu, lack),
        after.machine_busy,
    )


def _arithmetic(calls_s: float, cpu_s: float, all_s: float) -> float | None:
    """Return the share of a thread's CPU seconds that is arithmetic; None if unknown.

    Args:
        calls_s: CPU seconds that the calls take, whatever their rows.
        cpu_s: CPU seconds of the work with these calls.
        all_s: CPU seconds of the thread.
    """
    if calls_s <= 0 or cpu_s <= 0:
        return None
    return max(0.0, 1 - calls_s / cpu_s) * (cpu_s / all_s)


def working(spent: Mapping[str, Mapping[str, float]], sync: bool) -> tuple[float, float]:
    """Return seconds in which the inference thread acted, and seconds of learning.

    Args:
        spent: seconds by thread and state.
        sync: True if the inference thread also learns.
    """
    inference = {s: v for s, v in spent.get("inference", {}).items() if s not in WAITS["inference"]}
    if sync:
        learn = sum(v for s, v in inference.items() if s in LEARNING)
        return sum(inference.values()) - learn, learn
    learner = sum(v for s, v in spent["learner"].items() if s not in WAITS["learner"])
    return sum(inference.values()), learner


def _workers(
    before: Snapshot,
    after: Snapshot,
    inference: Mapping[str, float],
    act_s: float,
    lacks: Mapping[str, float],
) -> Workers | None:
    """Split the workers' time; None without their ledgers.

    Args:
        before: earlier snapshot.
        after: later snapshot.
        inference: seconds of the inference thread by state.
        act_s: seconds of acting.
        lacks: seconds in which the learner's threads have no processor, by thread.
    """
    old, new = before.servers, after.servers
    if old is None or new is None or new.time <= old.time:
        return None
    states = {s: v - old.states.get(s, 0.0) for s, v in new.states.items()}
    total, span = sum(states.values()), new.time - old.time
    if total <= 0:
        return None
    step, wait = states.get("step", 0.0) / total, states.get("wait", 0.0) / total
    pack = 1 - step - wait
    cpu, lack = (new.cpu_s - old.cpu_s) / total, (new.cpu_wait_s - old.cpu_wait_s) / total
    # The ledger says in which state a worker is, the kernel how long it ran or was kept from it.
    # What it ran in a step computed, as far as steps are that long; the rest was for messages.
    compute = min(step, max(0.0, cpu - pack))
    grpc = min(wait, max(0.0, cpu - pack - compute))
    lack_in_step = min(step - compute, lack * step)
    lack_in_wait = min(wait - grpc, lack - lack_in_step)
    messages = new.messages - old.messages
    away = wait - grpc - lack_in_wait
    # A message that waits for acting, for learning or in the queue is not on its way.
    answer = min(away, messages * _mean_acting_s(before, after) / total)
    thread = max(sum(inference.values()), 1e-9)
    away -= answer
    away -= min(away, inference.get("wait_learning", 0.0) / thread)
    # Nor is one that the learner has no processor to take or send.
    held = min(away, lacks.get("grpc", 0.0) / (after.time - before.time))
    act_lacks = min(1.0, lacks.get("inference", 0.0) / (act_s or 1.0))
    return Workers(
        total / span,
        step - compute - lack_in_step,
        compute + pack,
        grpc,
        lack_in_step + lack_in_wait + answer * act_lacks + held,
        answer * (1 - act_lacks),
        away - held,
        step * total,
        cpu * total,
        (new.rows - old.rows) / messages if messages else 0.0,
        messages / span,
    )


def _mean_acting_s(before: Snapshot, after: Snapshot) -> float:
    """Return about the mean time from a request to its actions [s]; 0 if unknown."""
    histograms = since(before.latency, after.latency).items()
    seen = [pair for phase, of in histograms if phase != "inference" for pair in middles(of)]
    count = sum(n for _, n in seen)
    return sum(middle * n for middle, n in seen) / count if count else 0.0


def _machine(
    before: Snapshot, after: Snapshot, cpu: Mapping[str, float], lack: Mapping[str, float]
) -> Machine | None:
    """Return the use of the learner's machine; None without its servers' counters there."""
    old, new = before.servers, after.servers
    if not after.cores or not before.machine_busy_s or old is None or new is None:
        return None
    if not new.here or new.time <= old.time:
        return None
    span, theirs = after.time - before.time, new.time - old.time
    evaluator = (new.evaluator_cpu_s - old.evaluator_cpu_s) / theirs
    own = cpu.get("", 0.0) / span + (new.tree_cpu_s - old.tree_cpu_s) / theirs + evaluator
    lacking = sum(lack.values()) / span + (new.cpu_wait_s - old.cpu_wait_s) / theirs
    busy = (after.machine_busy_s - before.machine_busy_s) / span
    return Machine(after.cores, max(busy, own), own, evaluator, lacking)
