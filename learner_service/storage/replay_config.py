"""Options of the replay of off-policy algorithms."""

from pydantic import Field

from shared.config import Section


class ReplayConfig(Section):
    """Options of the replay of off-policy algorithms.

    A row is one step of one environment, all its agents. Numbers of rows are of all learners of a
    run together; each has its share.
    """

    capacity_rows: int = Field(
        1_000_000, ge=1, description="rows kept by all learners together; then the oldest go"
    )
    capacity_bytes: int = Field(
        0, ge=0, description="limit on the memory of all learners' replays together; 0: none"
    )
    start_rows: int = Field(
        1000, ge=1, description="rows that all learners together collect before the first update"
    )
    batch_size: int = Field(
        256,
        ge=0,
        description="rows of an update, of all learners together; 0: as many as fit the memory and "
        "the replay",
    )
    update_interval: int = Field(
        64,
        ge=1,
        description="rows of all learners together from one burst of updates to the next; smaller: "
        "more updates",
    )
    updates_per_interval: int = Field(1, ge=1, description="updates of a burst")
    n_step: int = Field(1, ge=1, description="steps of reward before bootstrapping")
    unroll_steps: int = Field(
        8,
        ge=1,
        description="rows of an environment that are put at once; memory: 1/unroll_steps "
        "more than capacity_rows",
    )
    prioritized: bool = Field(False, description="sample rows of large error more often")
    alpha: float = Field(0.6, ge=0, le=1, description="prioritized: 0 is uniform, 1 proportional")
    beta: float = Field(
        0.4, ge=0, le=1, description="prioritized: how far the bias is corrected at first, 1: all"
    )
    beta_updates: int = Field(
        100_000, ge=1, description="prioritized: updates until beta has grown to 1"
    )
    prefetch: bool = Field(
        True, description="CUDA: gather the next batch on a second stream during an update"
    )
