"""A checkpoint of several learners: the manifest, update-<n>.pt, and a part by each further rank.

The manifest is rank 0's and is written last, so that a set without one is none. It holds what all
ranks share: networks, optimisers, opponents. A part holds what a rank has for itself: its storage,
its random numbers, its slots and its counters. Manifest and parts carry the same random mark: files
of two sets are never mixed.

A run that continues with another number of learners gives each old rank's work to one that is
there. Networks and optimisers are exact then; random numbers of further ranks begin from the seed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from murmur.learner_service.telemetry.progress import OWN_COUNTERS

SLOTS = 1 << 20  # of each rank: rank r has those from r * SLOTS on
_SHARED = "parts"  # of an algorithm's state: networks, optimisers, the loss scaler


def prefix(rank: int) -> str:
    """Return the prefix of the names of a rank's files; empty for rank 0."""
    return f"rank{rank}-" if rank else ""


def own_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's state without what all ranks share."""
    algorithm = {k: v for k, v in state["algorithm"].items() if k != _SHARED}
    return {**state, "algorithm": algorithm}


def adopted(rank: int, size: int, parts: int) -> list[int]:
    """The ranks of a checkpoint of `parts` ranks whose work a rank of `size` takes over."""
    return [part for part in range(parts) if part % size == rank]


def merged(parts: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The state that a rank continues from.

    Args:
        parts: parts by the rank that wrote them, the manifest first.
        rank: rank that continues.
        size: number of ranks that continue.
    """
    own = parts[rank] if rank < len(parts) else {}
    algorithm = {**parts[0]["algorithm"], **own.get("algorithm", {})}
    state = {**parts[0], **own, "algorithm": algorithm}
    if len(parts) == size:
        return state
    if not own:  # a generator that cannot be restored continues from the seed, which has the rank
        algorithm["generator"] = torch.empty(0, dtype=torch.uint8)
        state["generator"] = None
        if "curriculum" in state:  # rank 0's recent episodes are no other rank's
            state["curriculum"] = {**state["curriculum"], "episodes": {}, "windows": {}}
    mine = [parts[part] for part in adopted(rank, size, len(parts))]
    state["progress"] = _progress(parts[0]["progress"], [part["progress"] for part in mine])
    if "slots" in parts[0]:
        state |= _slots(parts, rank, size)
    if "league" in parts[0]:
        assigned = [
            slot
            for part in parts
            for slot in part["league"]["seats"]
            if slot[0] // SLOTS == rank  # other slots' episodes ended with their rank
        ]
        state["league"] = {**parts[0]["league"], "seats": assigned}
    return state


def _progress(first: Mapping[str, Any], mine: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counters of a rank that takes over those of `mine`; `first` knows what all ranks share."""
    dropped: dict[str, int] = {}
    recent: dict[str, list[float]] = {}
    for part in mine:
        for reason, rows in part["rows_dropped"].items():
            dropped[reason] = dropped.get(reason, 0) + rows
        for name, values in part["recent"].items():
            recent.setdefault(name, []).extend(values)
    return {
        **first,
        **{name: sum(part[name] for part in mine) for name in OWN_COUNTERS},
        "own_env_steps": sum(part.get("own_env_steps", part["env_steps"]) for part in mine),
        "rows_dropped": dropped,
        "recent": recent,
    }


def _slots(parts: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Slots of a rank: its own, and those that ranks which are gone may one day have again.

    Of the latter only the next episodes' numbers are kept, so that no seed is played twice.
    """
    slots: list[tuple[int, int, str]] = []
    for part in parts:
        for slot, episode, actions in part["slots"]:
            owner = slot // SLOTS
            if owner == rank:
                slots.append((slot, episode, actions))
            elif owner >= size and owner % size == rank:
                slots.append((slot, episode + 1, ""))
    of_rank = {
        name: {
            slot: value
            for part in parts
            for slot, value in part.get(name, {}).items()
            if slot // SLOTS == rank
        }
        for name in ("memory", "returns", "values")
    }
    return {
        "slots": sorted(slots),
        "first_episode": max(part.get("first_episode", 0) for part in parts),
        **of_rank,
        "again": [s for part in parts for s in part.get("again", ()) if s // SLOTS == rank],
    }
