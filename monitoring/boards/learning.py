"""The dashboard Learning: Returns, losses, lag, and the environment's own results."""

from dataclasses import replace

from monitoring.boards.overview import RETURN
from monitoring.panel import (
    LEARNER,
    LEARNER_NAME,
    Board,
    Panel,
    Variable,
    learner_gauge,
    per_second,
    quantiles,
    rate,
)

# Scalars of an update that share a scale share a panel; docs/algorithms.md names them. Every other
# one, such as a plug-in's, has a panel of its own.
SCALES = {
    "Losses of policies": (
        "(actor|policy|imitation)_loss",
        "Of the last update, as those below. Only their change tells something.",
    ),
    "Losses of critics": (
        "loss|(critic|value)_loss",
        "Of QMIX and segmentation the only loss. Grows for long: lower the critic's learning rate.",
    ),
    "Values": (
        "q_mean|return_mean|target_mean|target_std|td_error",
        "What critics say and what they should say. Mean far from its target: the critic knows "
        "little yet.",
    ),
    "Gradient norms": (
        "(.*_)?grad_norm",
        "Before clipping. 0 under fp16: steps are skipped. Far above max_grad_norm: lower the "
        "learning rate.",
    ),
    "Entropy of policies": (
        "entropy",
        "In nats. Near 0 early on: the policy explores no more; raise entropy_weight.",
    ),
    "Shares": (
        "beyond_rewards|clip_fraction|epsilon|explained_variance",
        "Explained variance near 0: the critic knows nothing yet. Clip fraction above 0.3: lower "
        "the learning rate or data_passes.",
    ),
}
_KNOWN = "|".join(names for names, _ in SCALES.values())
_RESULTS = [
    replace(RETURN, width=24),
    Panel(
        "Result: $metric",
        "Mean over recent episodes; docs/terrain.md, formation.md and snakes.md "
        "say what each means.",
        [
            (
                f'murmur_learner_episode_metric{{{LEARNER}, name=~"$metric"}}',
                f"{{{{mode}}}} {LEARNER_NAME}",
            )
        ],
        width=6,
        repeat="metric",
    ),
]
_UPDATES = [
    *(
        Panel(
            title,
            description,
            [
                (
                    f'murmur_learner_loss{{{LEARNER}, name=~"{names}"}}',
                    f"{{{{name}}}} {LEARNER_NAME}",
                )
            ],
            width=8,
        )
        for title, (names, description) in SCALES.items()
    ),
    Panel(
        "Updates a second",
        "Improvements of the policy.",
        [(rate("murmur_learner_updates_total"), f"learner {LEARNER_NAME}")],
        per_second("updates"),
    ),
    Panel(
        "Time of an update",
        "High: fewer data_passes, lower precision, a faster device.",
        quantiles("murmur_learner_update_seconds"),
        "s",
    ),
    Panel(
        "Scalar: $scalar",
        "Further scalars of the last update; docs/algorithms.md.",
        [
            (
                f'murmur_learner_loss{{{LEARNER}, name=~"$scalar", name!~"{_KNOWN}"}}',
                f"learner {LEARNER_NAME}",
            )
        ],
        width=6,
        repeat="scalar",
    ),
]
_ROWS = [
    Panel(
        "Policy lag",
        "Updates between choosing an unroll's first action and learning from it, mean over the "
        "unrolls. At most max_policy_lag.",
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
        per_second("rows"),
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
        per_second("episodes"),
    ),
]
BOARD = Board(
    "murmur-learning",
    "Learning",
    "Returns, losses, lag, and the environment's own results.",
    [("Results", _RESULTS), ("Updates", _UPDATES), ("Rows", _ROWS)],
    variables=[
        Variable(
            "metric", "result", f"label_values(murmur_learner_episode_metric{{{LEARNER}}}, name)"
        ),
        Variable(
            "scalar",
            "further scalar",
            f'label_values(murmur_learner_loss{{{LEARNER}, name!~"{_KNOWN}"}}, name)',
        ),
    ],
)
