"""The curves of a line of progress.jsonl, by the names that all trackers give them."""

from collections.abc import Mapping
from typing import Any


def scalars_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a line of progress.jsonl by name, such as episode/return or update/entropy.

    Args:
        line: line of kind "progress" or "evaluation".
    """
    if line["kind"] == "evaluation":
        return {f"evaluation/{name}": float(of["mean"]) for name, of in line["metrics"].items()}
    found = {"episode/return": line["return"]}
    found |= {f"episode/{name}": value for name, value in line["metrics"].items()}
    found |= {f"update/{name}": value for name, value in line["losses"].items()}
    found |= {f"curriculum/{name}": x["number"] for name, x in line.get("curriculum", {}).items()}
    found["rate/agent_steps_per_s"] = line["agent_steps_per_s"]
    found["rate/policy_lag"] = line["policy_lag"]
    found |= {f"device/{name}": value for name, value in line["device"].items()}
    return {name: float(value) for name, value in found.items() if value is not None}
