"""Hashes of what short runs in turn learn, so that two commits can be compared bit for bit.

    python -m tests.same_weights OUT.json [PART_OF_A_NAME ...]

Each case is one `murmur train` with a fixed seed and `learner.pipeline=sync`; the hash is that of
the algorithm's whole state in the last checkpoint: weights, optimisers, counters, random numbers.
Run it on two checkouts (`--root OTHER`) on one machine: equal hashes mean equal arithmetic.
Every option that has an effect on the weights is written out, so that defaults may change.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
UPDATES = 24
COMMON: dict[str, Any] = {
    "env_server": {
        "num_workers": 1,
        "envs_per_worker": 8,
        "sessions_per_worker": 2,
        "metrics_port": 0,
    },
    "learner": {
        "port": 0,
        "metrics_port": 0,
        "pipeline": "sync",
        "device": "cpu",
        "num_threads": 1,
        "checkpoint_every_updates": 1000,
    },
    "run": {"seed": 7, "max_updates": UPDATES},
}
SPREAD = {"name": "spread", "episode_steps": 10}
ACTING = {**SPREAD, "continuous": True}
MATRIX = {"name": "matrix", "episode_steps": 5}
MEMORY = {"name": "memory", "num_agents": 2, "delay": 3}
TERRAIN = {"name": "terrain", "budget": 4, "num_agents": 3}
MLP = {"name": "mlp", "hidden": [32, 32], "recurrent": 0, "agent_id": True}
GRU = {**MLP, "hidden": [32], "recurrent": 16}
CNN = {
    "name": "cnn",
    "channels": [8, 8],
    "kernels": [3, 3],
    "strides": [2, 2],
    "hidden": [32],
    "centred": [0],
    "centred_state": [0],
}
COMA = {
    "name": "coma",
    "batch_size": 60,
    "batch_number": 4,
    "data_passes": 2,
    "unroll_steps": 5,
    "normalize_advantage": True,
    "actor_lr": 1e-3,
    "critic_lr": 1e-3,
}
MAPPO = {
    "name": "mappo",
    "batch_size": 60,
    "batch_number": 4,
    "data_passes": 2,
    "unroll_steps": 5,
}
REPLAY = {
    "capacity_rows": 2000,
    "start_rows": 64,
    "batch_size": 32,
    "update_interval": 32,
    "updates_per_interval": 1,
    "n_step": 2,
    "unroll_steps": 4,
    "prioritised": True,
}
MASAC = {"name": "masac", "replay": REPLAY}
MADDPG = {"name": "maddpg", "replay": REPLAY, "policy_delay": 2, "twin_critics": True}
QMIX = {"name": "qmix", "replay": REPLAY}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "coma, spread": (SPREAD, COMA, MLP),
    "coma, spread, own": (SPREAD, {**COMA, "share_parameters": False, "clip_ratio": 0.2}, MLP),
    "coma, memory, recurrent": (MEMORY, COMA, GRU),
    "coma, terrain, images": (TERRAIN, {**COMA, "batch_size": 30}, CNN),
    "mappo, spread": (SPREAD, MAPPO, MLP),
    "mappo, spread, continuous, groups": (ACTING, {**MAPPO, "share_parameters": [0, 0, 1]}, MLP),
    "mappo, memory, recurrent, own": (MEMORY, {**MAPPO, "share_parameters": False}, GRU),
    "ippo, memory, recurrent": (MEMORY, {**MAPPO, "centralised": False}, GRU),
    "maddpg, spread, continuous": (ACTING, MADDPG, MLP),
    "maddpg, matrix, own": (MATRIX, {**MADDPG, "share_parameters": False}, MLP),
    "masac, spread, continuous, own": (ACTING, {**MASAC, "share_parameters": False}, MLP),
    "masac, matrix": (MATRIX, MASAC, MLP),
    "qmix, spread": (SPREAD, QMIX, MLP),
    "vdn, matrix, own": (MATRIX, {**QMIX, "mixer": "vdn", "share_parameters": False}, MLP),
    "iql, memory": (MEMORY, {**QMIX, "mixer": "none"}, MLP),
}


def train(root: Path, case: str, folder: Path) -> str:
    """The hash of what one case learned."""
    environment, algorithm, network = CASES[case]
    config = folder / "case.yaml"
    parts = {"environment": environment, "algorithm": algorithm, "network": network}
    config.write_text(json.dumps(COMMON | parts))  # JSON is YAML
    run = folder / "run"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MURMUR", "PYTHONPATH"))}
    done = subprocess.run(
        [sys.executable, "-m", "murmur", "train", str(config), "--run", str(run)],
        cwd=root,
        env=env | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{case}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    last = max((run / "checkpoints").glob("update-*.pt"))
    state = torch.load(last, map_location="cpu", weights_only=True)
    assert state["progress"]["updates"] == UPDATES
    return digest(state["algorithm"])


def digest(state: Any) -> str:
    """SHA-256 of tensors and numbers, by name, in the order of their names."""
    found = hashlib.sha256()
    for path, value in _leaves(state, ""):
        found.update(path.encode())
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(
                value.detach().contiguous().view(torch.uint8).numpy().tobytes()
                if value.dim()
                else repr(value.item()).encode()
            )
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key in sorted(node, key=str):
            yield from _leaves(node[key], f"{path}/{key}")
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for i, value in enumerate(node):
            yield from _leaves(value, f"{path}/{i}")
    else:
        yield path, node


def main() -> None:
    """Run the cases named, or all, and write their hashes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="parts of the cases' names; none: all")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout that trains")
    given = parser.parse_intermixed_args()
    hashes = {}
    for case in CASES:
        if given.names and not any(name in case for name in given.names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            hashes[case] = train(given.root.resolve(), case, Path(folder))
        print(f"{hashes[case][:16]}  {case}", flush=True)
        given.out.write_text(json.dumps(hashes, indent=2) + "\n")


if __name__ == "__main__":
    main()
