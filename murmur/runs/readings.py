"""Readings of figures: what a metric or a loss says, and in which direction it is better.

The report, the comparison and the live page use the same ones.
"""

from collections.abc import Iterable

from murmur.runs.scores import Metric

UP, DOWN = "↑", "↓"  # higher is better, lower is better

# Metrics of the environments here, of adapters, and of segmentation. Others have no direction.
_HIGHER = (
    "return f1 coverage occupied success formation formation_joined formation_all score "
    "score_difference win beans f_score miou accuracy iou"
)
_LOWER = "entropy collision collisions timeout loss opponent_score deaths"
_DIRECTIONS = dict.fromkeys(_HIGHER.split(), UP) | dict.fromkeys(_LOWER.split(), DOWN)

METRICS = {
    "entropy": "How unsure the team is about the cells that matter, in bits: 1 is no idea, 0 is "
    "certain.",
    "f1": "How well the mapped region of interest matches the true one: 1 is exact.",
    "coverage": "Share of the area that was seen at least once.",
    "return": "Rewards summed since the episode began.",
}

_LOSSES = {
    "loss": "What the optimizer reduces.",
    "actor_loss": "What the actor's update reduces. Its level says little: the batch and the "
    "policy change with every update.",
    "critic_loss": "How far the critic's predictions are from their targets: it should fall, then "
    "stay.",
    "cross_entropy": "Cross entropy of the predicted classes with the masks: it should fall.",
    "entropy": "How undecided the policy is: it falls as the policy commits itself. Near 0 it no "
    "longer explores.",
    "clip_fraction": "Share of actions whose change of probability was clipped: above about 0.3 "
    "the steps of an update are large.",
    "kl": "Divergence between the policies before and after an update: spikes are large steps.",
    "actor_grad_norm": "Length of the actor's gradient before clipping: spikes hint at an unstable "
    "update.",
    "critic_grad_norm": "Length of the critic's gradient before clipping: growth without end hints "
    "at values that diverge.",
    "grad_norm": "Length of the gradient before clipping: spikes hint at an unstable update.",
    "return_mean": "Mean of the returns that the critic learns to predict: it rises with the "
    "policy.",
    "advantage_std": "Spread of the advantages before normalization: near 0 all actions seem "
    "alike.",
    "explained_variance": "Share of the returns' variance that the critic explains: 1 is all, 0 or "
    "less is nothing.",
    "q_mean": "Mean value of the actions taken: far above any return it is overestimated.",
    "target_mean": "Mean of the targets that the critic learns: values and targets rise together.",
    "target_std": "Spread of the critic's targets: near 0 there is nothing to tell apart.",
    "td_error": "Mean distance of a value from its target, in units of the return.",
    "temperature": "Weight of the entropy bonus: it falls once the policy has the entropy wanted.",
    "epsilon": "Share of actions taken at random.",
    "noise": "Deviation of the noise added to actions.",
    "beyond_rewards": "Share of values beyond what the rewards allow: above 0 they are "
    "overestimated.",
    "imitation_loss": "How far the policy is from the expert's actions.",
    "imitation_share": "Share of the rows on which the expert is imitated.",
}


def direction(name: str, metric: Metric | None = None) -> str:
    """Return UP or DOWN for a metric, or "" if neither direction is better.

    Args:
        name: name of the metric; that of a team follows a "/".
        metric: metric that chooses the best checkpoint; its direction is the configuration's.
    """
    if metric is not None and metric.name == name:
        return DOWN if metric.less_is_better else UP
    return _DIRECTIONS.get(name.partition("/")[0], "")


def best_names(values: Iterable[tuple[str, float]], better: str) -> set[str]:
    """Return the names of the best values: of all that are equally good, none without a direction.

    A single value is compared with nothing, so none is best.
    """
    known = {name: value for name, value in values if value == value}  # NaN is no value
    if not better or len(known) < 2:
        return set()
    best = Metric("", better == DOWN).best(known.values())
    return {name for name, value in known.items() if value == best}


def metric_reading(name: str, better: str) -> str:
    """Return what a metric says, with its direction; "" if neither is known."""
    words = {UP: "Higher is better.", DOWN: "Lower is better.", "": ""}[better]
    return f"{METRICS.get(name, '')} {words}".strip()


def loss_reading(name: str) -> str:
    """Return what a loss or a figure beside the losses says; "" for one of a plug-in."""
    if known := _LOSSES.get(name):
        return known
    # A part of a figure, as of an agent or a second critic: critic_loss/3, critic_2_loss.
    parts = set(name.partition("/")[0].split("_"))
    fitting = (n for n in _LOSSES if "_" in n and parts.issuperset(n.split("_")))
    return _LOSSES.get(next(fitting, ""), "")
