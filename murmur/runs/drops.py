"""Messages on dropped rows and on the learner's choice of the rollout."""

from collections.abc import Mapping
from typing import Any

MANY = 0.02  # share of the rows received
FEWEST_ROWS = 2000  # received, before a share says anything
_REMEDIES = {
    "lag": "an environment step took longer than learner.max_policy_lag updates: raise "
    "learner.max_policy_lag, or let an update take more rows",
    "session": "sessions of environment servers ended: the logs of the environment servers say why",
    "skipped": "updates were skipped since a loss was not finite: lower the learning rates, or set "
    "learner.precision=fp32",
    "restart": "the learner ended unexpectedly: its log says why; a lower "
    "learner.checkpoint_every_updates loses less",
}


def dropped_message(record: Mapping[str, Any]) -> str:
    """Return the reason for a record's dropped rows and the remedy; "" if few were dropped."""
    received = record.get("rows_received", 0)
    dropped: Mapping[str, int] = record.get("rows_dropped", {})
    share = sum(dropped.values()) / max(received, 1)
    if received < FEWEST_ROWS or share <= MANY:
        return ""
    reason = max(dropped, key=lambda name: dropped[name])
    return (
        f"{100 * share:.0f} % of the rows received were dropped before the learner learned from "
        f"them, most of them because {_REMEDIES.get(reason, reason)}"
    )


def rollout_message(record: Mapping[str, Any]) -> str:
    """Return the rollout that the learner chose for its connected environments; "" if none."""
    chosen = record.get("rollout") or {}
    if not chosen.get("environments"):
        return ""
    lag = chosen.get("max_policy_lag")
    return (
        f"an update takes {chosen['unrolls_per_update']} unrolls of {chosen['unroll_steps']} steps "
        f"from {chosen['environments']} environments"
        + ("" if lag is None else f", rows at most {lag} updates old")
    )
