"""Parts of a forecast: costs, machines, and what comes out."""

from dataclasses import dataclass

from murmur.learner_service.storage.flight import Flight


@dataclass(frozen=True)
class Costs:
    """Costs of each kind of work: processor seconds unless stated otherwise.

    Attributes:
        step_s: cost of a worker for a message: the environments' step, packing, gRPC, unpacking.
        step_row_s: additional cost of a worker for each environment row of the message.
        message_s: cost of the learner's event loop for a message.
        io_message_s: cost of gRPC's own threads for a message; they need no interpreter.
        batch_s: cost of the inference thread for a batch: storing and replying.
        batch_message_s: additional cost of the inference thread for each message of the batch.
        copy_message_s: cost of the inference thread for each message of the batch: copies of
            observations, which need no interpreter.
        act_s: cost of the policy for a batch; on a GPU device seconds.
        act_message_s: additional cost of the policy for each message of the batch.
        update_s: cost of an update, see also `update_rows`; on a GPU device seconds.
        update_row_s: additional cost of an update for each environment row of a rank.
        update_host_s: host's cost of an update, beside the device: launches outside graphs,
            publishing.
        update_replays_s: host's cost of an update, beside the device: replays of its graphs.
        update_eager_s: host's cost of an update, beside the device, if its kernels are launched one
            by one.
        eager: share of updates whose kernels are launched one by one.
        hop_s: seconds from one process to the other, beside the processor time.
        message_bytes: bytes of an observation message.
        update_rows: environment rows of all ranks that update_s, update_replays_s and
            update_eager_s are for; more rows, in proportion more minibatches. 0: any number.
        device: True if `act_` and `update_` costs are of a GPU.
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
class Replays:
    """Settings of learning from a replay.

    Attributes:
        unroll_steps: transitions of an unroll, L.
        start_rows: rows of one rank before the first update.
        interval: rows of one rank from one burst of updates to the next.
        updates: updates of a burst.
        batch_rows: rows of one rank that an update draws; may be a fraction.
        ahead: unrolls that acting may be ahead in every environment; None: any, sync.
    """

    unroll_steps: int
    start_rows: int
    interval: int
    updates: int
    batch_rows: float
    ahead: int | None


@dataclass(frozen=True)
class System:
    """System to simulate.

    Attributes:
        cores: processors, of all ranks and workers together.
        workers: worker processes, of all ranks together.
        sessions: sessions of a worker.
        envs: environments of a session.
        learning: needs of one rank's update.
        costs: costs of each kind of work.
        ranks: number of ranks, N.
        exchange_s: seconds of an update's all-reduces that nothing hides.
        sync: True if acting and learning take turns.
        max_batch_envs: limit of the batcher, in environments.
        link_bytes_per_s: bandwidth of a learner's network; 0: no limit.
        others: processors that other programs use.
    """

    cores: int
    workers: int
    sessions: int
    envs: int
    learning: Flight | Replays
    costs: Costs
    ranks: int = 1
    exchange_s: float = 0.0
    sync: bool = False
    max_batch_envs: int = 4096
    link_bytes_per_s: float = 0.0
    others: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation.

    Attributes:
        seconds: simulated seconds after the warm-up.
        rows: environment rows per second, of all ranks.
        updates: updates per second.
        busy: share of the time in which each resource worked, 0 to 1, by name.
        blocked: share of the sessions that waited for the learner.
        peers: share of the time in which ranks waited for each other and exchanged gradients.
        lag: mean policy lag of the rows learned from, in updates.
        batch: messages of an inference batch.
        turn_s: time from an answer to a session's next answer, of those not made to wait.
        update_s: time of an update.
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
