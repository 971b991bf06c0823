"""The dashboard Learning: Returns, losses, lag, and the environment's own results."""

from monitoring.boards.overview import RETURN
from monitoring.panel import LEARNER, Board, Panel, learner_gauge, quantiles, rate

_RESULTS = [
    RETURN,
    Panel(
        "The environment's results",
        "Means over recent episodes; docs/terrain.md, formation.md and snakes.md "
        "say what each means.",
        [(f'murmur_learner_episode_metric{{{LEARNER}, name=~"$metric"}}', "{{name}} {{mode}}")],
    ),
]
_UPDATES = [
    Panel(
        "Losses",
        "Of the last update. What each is: docs/algorithms.md.",
        [(f'murmur_learner_loss{{{LEARNER}, name=~".*loss.*"}}', "{{name}} {{instance}}")],
    ),
    Panel(
        "Other scalars of the update",
        "Gradient norms of 0 under fp16: steps are skipped. Explained variance "
        "near 0: the critic knows nothing yet.",
        [(f'murmur_learner_loss{{{LEARNER}, name!~".*loss.*"}}', "{{name}} {{instance}}")],
    ),
    Panel(
        "Updates a second",
        "Improvements of the policy.",
        [(rate("murmur_learner_updates_total"), "{{instance}}")],
        "ops",
    ),
    Panel(
        "Time of an update",
        "High: fewer data_passes, lower precision, a faster device.",
        quantiles("murmur_learner_update_seconds"),
        "s",
    ),
]
_ROWS = [
    Panel(
        "Policy lag",
        "Updates between acting on a row and learning from it, mean. Above "
        "max_policy_lag rows are dropped.",
        [learner_gauge("murmur:policy_lag:mean")],
        warn=2,
    ),
    Panel(
        "Rows received, trained, dropped",
        "Dropped for lag: match batch_size * batch_number to the number of "
        "environments. For session: environment servers die.",
        [
            (f"sum({rate('murmur_learner_rows_received_total')})", "received"),
            (f"sum({rate('murmur_learner_rows_trained_total')})", "trained"),
            (
                f"sum by (reason) ({rate('murmur_learner_rows_dropped_total')}) or vector(0)",
                "dropped {{reason}}",
            ),
        ],
        "ops",
    ),
    Panel(
        "Rows that wait for an update",
        "In full unrolls.",
        [learner_gauge("murmur_learner_rows_stored")],
    ),
    Panel(
        "Episodes a second",
        "None: episodes are long, or no session plays.",
        [(f"sum by (mode) ({rate('murmur_learner_episodes_total')})", "{{mode}}")],
        "ops",
    ),
]
BOARD = Board(
    "murmur-learning",
    "Learning",
    "Returns, losses, lag, and the environment's own results.",
    [("Results", _RESULTS), ("Updates", _UPDATES), ("Rows", _ROWS)],
)
