"""What a forecast is made of: costs, machines, and what an update takes."""

from dataclasses import dataclass, field

from murmur.plan.storage import Replays, Rollouts


@dataclass(frozen=True)
class Costs:
    """What things cost: processor seconds where nothing else is said.

    Attributes:
        step_s: of a worker, for a message: the environments' step, packing, gRPC, unpacking.
        step_row_s: of a worker, in addition for each environment row of the message.
        message_s: of the learner's event loop, for a message.
        io_message_s: of gRPC's own threads, for a message; they need no interpreter.
        batch_s: of the inference thread, for a batch: storing and replying.
        batch_message_s: of the inference thread, in addition for each message of the batch.
        copy_message_s: of the inference thread, for each message of the batch: copies of
            observations, which need no interpreter.
        act_s: of the policy, for a batch; on a GPU device seconds.
        act_message_s: of the policy, in addition for each message of the batch.
        update_s: of an update, see also `update_rows`; on a GPU device seconds.
        update_row_s: of an update, in addition for each environment row of a rank.
        update_host_s: of an update, beside the device: launches outside graphs, publishing.
        update_replays_s: of an update, beside the device: replays of its graphs.
        update_eager_s: of an update, beside the device, if its kernels are launched one by one.
        eager: share of updates that are.
        hop_s: seconds from one process to the other, beside the processor time.
        message_bytes: of an observation message.
        update_rows: environment rows of all ranks that update_s, update_replays_s and
            update_eager_s are for; more rows, in proportion more minibatches. 0: any number.
        device: whether `act_` and `update_` costs are of a GPU.
        threads: processors that an update on the CPU can use at once.
        steps_per_row: environment steps of a row; rows that begin an episode are none.
        jitter: standard deviation over mean of a job's work.
        parameters: weights of the networks whose gradients are exchanged.
    """

    step_s: float
    message_s: float
    batch_s: float
    act_s: float
    update_s: float
    update_row_s: float = 0.0
    update_host_s: float = 0.0
    step_row_s: float = 0.0
    batch_message_s: float = 0.0
    act_message_s: float = 0.0
    hop_s: float = 0.0
    message_bytes: float = 0.0
    device: bool = False
    threads: int = 1
    steps_per_row: float = 1.0
    jitter: float = 0.0
    parameters: int = 0
    io_message_s: float = 0.0
    copy_message_s: float = 0.0
    update_replays_s: float = 0.0
    update_eager_s: float = 0.0
    eager: float = 0.0
    update_rows: float = 0.0


@dataclass(frozen=True)
class Group:
    """What ranks do with each other in an update.

    Attributes:
        ranks: N.
        exchange_s: seconds of an update's all-reduces that nothing hides.
    """

    ranks: int = 1
    exchange_s: float = 0.0


@dataclass(frozen=True)
class System:
    """What is simulated.

    Attributes:
        cores: processors, of all ranks and workers together.
        workers: worker processes, of all ranks together.
        sessions: of a worker.
        envs: environments of a session.
        learning: what an update of one rank takes.
        costs: of everything.
        group: of ranks.
        sync: acting and learning take turns.
        max_batch_envs: of the batcher.
        link_bytes_per_s: of a learner's network; 0: no limit.
        others: processors that other programs use.
    """

    cores: int
    workers: int
    sessions: int
    envs: int
    learning: Rollouts | Replays
    costs: Costs
    group: Group = field(default_factory=Group)
    sync: bool = False
    max_batch_envs: int = 4096
    link_bytes_per_s: float = 0.0
    others: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation.

    Attributes:
        seconds: simulated, after the warm-up.
        rows: environment rows a second, of all ranks.
        updates: a second.
        busy: share of the time in which each resource worked, 0 to 1, by name.
        blocked: share of the sessions that waited for the learner.
        peers: share of the time in which ranks waited for each other and exchanged gradients.
        lag: of the rows learned from, in updates.
        batch: messages of an inference batch.
        turn_s: from an answer to a session's next answer, of those not made to wait.
        update_s: of an update.
        update_rows: environment rows that one rank's update learned from.
    """

    seconds: float
    rows: float
    updates: float
    busy: dict[str, float]
    blocked: float
    peers: float
    lag: float
    batch: float
    turn_s: float
    update_s: float
    update_rows: float
