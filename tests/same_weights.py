"""Hashes of what short runs in turn learn, so that two commits can be compared bit for bit.

    python -m tests.same_weights [PART_OF_A_NAME ...]            compare with EXPECTED
    python -m tests.same_weights --against CHECKOUT [PART ...]   compare with another checkout
    python -m tests.same_weights --twice [PART ...]              run each case twice
    python -m tests.same_weights --save [PART ...]               write hashes into EXPECTED

Each case is a `murmur train` with a fixed seed and `learner.pipeline=sync`; the hash is that of
the algorithm's whole state in the last checkpoint: weights, optimisers, counters, random numbers.
Every option that has an effect on the weights is written out, so that defaults may change. Equal
hashes mean equal arithmetic on one machine: EXPECTED holds those of each version of torch and kind
of CPU. A case that a checkout cannot run is reported, and is no difference.

Tensors are hashed by their names in the checkpoint. NAMES lists pairs [old, new] of beginnings of
names, such as ["parts/critic/trunk.", "parts/critic/body."]: where a name begins with the new one,
the old one is read in its place. So what was renamed stays comparable with older checkouts.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = Path(__file__).with_name("same_weights_expected.json")
NAMES = Path(__file__).with_name("same_weights_names.json")
TIMEOUT_S = 600
SHOWN = 5  # names of tensors that differ
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
    # Former names, here and below: checkouts of before train with these options as well.
    "centred": [0],
    "centred_state": [0],
}
COMA = {
    "name": "coma",
    "advantage": "critic",
    "gamma": 0.99,
    "batch_size": 60,
    "batch_number": 4,
    "data_passes": 2,
    "unroll_steps": 5,
    "normalize_advantage": True,
    "normalise_rewards": False,
    "clip_ratio": 0.0,
    "entropy_weight": 0.0,
    "epsilon_start": 0.5,
    "epsilon_end": 0.02,
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
SNAKES = {"name": "snakes", "opponent": "greedy", "observation": "egocentric"}
PIXELS = Path(__file__).with_name("same_weights_pixels.py")
DOTS = {"name": "pettingzoo", "factory": "same_weights_pixels:Dots", "resize": "none"}
FACES = {"name": "faces", "size": 24, "train": 10, "valid": 4}
SMALL = {**CNN, "channels": [4], "kernels": [3], "strides": [3], "hidden": [16]}
SEEING = {k: v for k, v in SMALL.items() if not k.startswith("centred")}
NORMALISED = {**MLP, "normalise_observations": True}
APART = {"share_parameters": False, "frozen_agents": [1]}
SHIFT = {"augment": {"preset": "random-shift", "pad": 2}}
SYMMETRY = {"augment": {"preset": "symmetry"}}
LEAGUE = {"league": {"size": 2, "every_updates": 3, "latest": 0.3}}
MASAC = {"name": "masac", "gamma": 0.99, "initial_temperature": 0.1, "replay": REPLAY}
TWINS = {"policy_delay": 2, "twin_critics": True}
MADDPG = {"name": "maddpg", "gamma": 0.99, "replay": REPLAY, **TWINS}
GUMBEL = {**MADDPG, "actor_gradient": "gumbel"}
QMIX = {"name": "qmix", "gamma": 0.99, "replay": REPLAY}
SEQUENCES = {"replay": {**REPLAY, "prioritised": False, "n_step": 1}}
MAPPO_30 = {**MAPPO, "batch_size": 30, "batch_number": 2}
SEGMENTATION = {
    "name": "segmentation",
    "epochs": 4,
    "batch_size": 4,
    "evaluate_every_epochs": 2,
}
UNET = {"name": "unet", "channels": [8, 16]}


@dataclass(frozen=True)
class Case:
    """A short run.

    Attributes:
        environment: section `environment`; that of `source` if its name is "faces".
        algorithm: section `algorithm`.
        network: section `network`.
        more: other sections, or options of those in COMMON.
        updates: of the whole run.
        resumed_at: update after which the run is stopped and resumed; 0: it is not.
        learners: ranks.
    """

    environment: Mapping[str, Any]
    algorithm: Mapping[str, Any]
    network: Mapping[str, Any]
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    updates: int = UPDATES
    resumed_at: int = 0
    learners: int = 1

    def config(self) -> dict[str, Any]:
        """Return the whole configuration."""
        kind = "source" if self.environment["name"] == "faces" else "environment"
        found = COMMON | {
            kind: self.environment,
            "algorithm": self.algorithm,
            "network": self.network,
        }
        changed = {name: {**found.get(name, {}), **options} for name, options in self.more.items()}
        limit = {"run": {**COMMON["run"], "max_updates": self.updates}}
        workers = {"env_server": {**COMMON["env_server"], "num_workers": self.learners}}
        if kind == "source":
            workers = {"env_server": {"num_workers": 1, "metrics_port": 0}}
        return found | limit | workers | changed


TWO = {"learners": 2}
CASES: dict[str, Case] = {
    "coma, spread": Case(SPREAD, COMA, MLP),
    "coma, spread, own": Case(SPREAD, {**COMA, "share_parameters": False, "clip_ratio": 0.2}, MLP),
    "coma, memory, recurrent": Case(MEMORY, COMA, GRU),
    "coma, terrain, images": Case(TERRAIN, {**COMA, "batch_size": 30}, CNN),
    "mappo, spread": Case(SPREAD, MAPPO, MLP),
    "mappo, spread, continuous, groups": Case(
        ACTING, {**MAPPO, "share_parameters": [0, 0, 1]}, MLP
    ),
    "mappo, memory, recurrent, own": Case(MEMORY, {**MAPPO, "share_parameters": False}, GRU),
    "ippo, memory, recurrent": Case(MEMORY, {**MAPPO, "centralised": False}, GRU),
    "maddpg, spread, continuous": Case(ACTING, MADDPG, MLP),
    "maddpg, matrix, own": Case(MATRIX, {**GUMBEL, "share_parameters": False}, MLP),
    "masac, spread, continuous, own": Case(ACTING, {**MASAC, "share_parameters": False}, MLP),
    "masac, matrix": Case(MATRIX, MASAC, MLP),
    "qmix, spread": Case(SPREAD, QMIX, MLP),
    "vdn, matrix, own": Case(MATRIX, {**QMIX, "mixer": "vdn", "share_parameters": False}, MLP),
    "iql, memory": Case(MEMORY, {**QMIX, "mixer": "none"}, MLP),
    "mappo, pixels, stacked frames": Case(DOTS, MAPPO_30, {**SEEING, "frame_stack": 2}),
    "qmix, pixels, stacked frames": Case(DOTS, QMIX, {**SEEING, "frame_stack": 3}),
    "mappo, spread, normalised": Case(SPREAD, {**MAPPO, "normalise_rewards": True}, NORMALISED),
    "coma, spread, normalised": Case(SPREAD, {**COMA, "normalise_rewards": True}, NORMALISED),
    "masac, spread, normalised": Case(ACTING, {**MASAC, "normalise_rewards": True}, NORMALISED),
    "qmix, spread, normalised": Case(SPREAD, {**QMIX, "normalise_rewards": True}, NORMALISED),
    "mappo, spread, frozen": Case(SPREAD, {**MAPPO, **APART}, MLP),
    "coma, spread, frozen": Case(SPREAD, {**COMA, **APART}, MLP),
    "maddpg, spread, frozen": Case(ACTING, {**MADDPG, **APART}, MLP),
    "qmix, spread, frozen": Case(SPREAD, {**QMIX, **APART}, MLP),
    "mappo, memory, imitation": Case(
        MEMORY, MAPPO, GRU, {"imitation": {"baseline": "recall", "updates": 12}}
    ),
    "coma, memory, imitation": Case(
        MEMORY, COMA, GRU, {"imitation": {"baseline": "recall", "updates": 12}}
    ),
    "mappo, pixels, shifted": Case(DOTS, MAPPO_30, SEEING, SHIFT),
    "qmix, pixels, shifted": Case(DOTS, QMIX, SEEING, SHIFT),
    "mappo, snakes, symmetry": Case(SNAKES, MAPPO, MLP, SYMMETRY),
    "coma, terrain, symmetry": Case(TERRAIN, {**COMA, "batch_size": 30}, SMALL, SYMMETRY),
    "qmix, snakes, symmetry": Case(SNAKES, QMIX, MLP, SYMMETRY),
    "mappo, snakes, league": Case(
        {**SNAKES, "control": "both"}, {**MAPPO, "centralised": False}, MLP, LEAGUE
    ),
    "mappo, snakes, league, recurrent": Case(
        {**SNAKES, "control": "both"}, {**MAPPO, "centralised": False}, GRU, LEAGUE
    ),
    "qmix, memory, recurrent": Case(MEMORY, {**QMIX, **SEQUENCES}, GRU),
    "iql, memory, recurrent, own": Case(
        MEMORY, {**QMIX, **SEQUENCES, "mixer": "none", "share_parameters": False}, GRU
    ),
    "segmentation, faces": Case(
        FACES, SEGMENTATION, UNET, {"augment": {"preset": "strong", "mixup": 0.3}}, updates=12
    ),
    "segmentation, faces, resumed": Case(
        FACES,
        SEGMENTATION,
        UNET,
        {"augment": {"preset": "progressive", "at": 2}},
        updates=12,
        resumed_at=5,
    ),
    "mappo, spread, two ranks": Case(SPREAD, MAPPO, MLP, **TWO),
    "masac, spread, normalised, two ranks": Case(ACTING, MASAC, NORMALISED, **TWO),
    "mappo, memory, recurrent, resumed": Case(MEMORY, MAPPO, GRU, resumed_at=10),
    "masac, spread, normalised, resumed": Case(ACTING, MASAC, NORMALISED, resumed_at=10),
    "qmix, memory, recurrent, resumed": Case(MEMORY, {**QMIX, **SEQUENCES}, GRU, resumed_at=10),
    "mappo, snakes, league, resumed": Case(
        {**SNAKES, "control": "both"}, {**MAPPO, "centralised": False}, MLP, LEAGUE, resumed_at=10
    ),
}


class RunError(Exception):
    """A checkout that does not run a case; the message is its own."""


def train(root: Path, case: Case, folder: Path) -> dict[str, str]:
    """Run a case.

    Args:
        root: checkout that trains.
        case: what to run.
        folder: empty folder for the run.

    Returns:
        hash of each tensor and number that was learned, by name.

    Raises:
        RunError: if the training fails.
    """
    config = folder / "case.yaml"
    config.write_text(json.dumps(case.config()))  # JSON is YAML
    shutil.copy(PIXELS, folder)
    run, learners = folder / "run", ["--learners", str(case.learners)] if case.learners > 1 else []
    if case.resumed_at:
        limits = (f"run.max_updates={updates}" for updates in (case.resumed_at, case.updates))
        first, second = (["--run", str(run), "--set", limit] for limit in limits)
        _murmur(root, folder, ["train", str(config), *first, *learners])
        _murmur(root, folder, ["train", "--resume", *second, *learners])
    else:
        _murmur(root, folder, ["train", str(config), "--run", str(run), *learners])
    last = max((run / "checkpoints").glob("update-*.pt"))
    state = torch.load(last, map_location="cpu", weights_only=True)
    if state["progress"]["updates"] != case.updates:
        raise RunError(f"made {state['progress']['updates']} updates, not {case.updates}")
    return leaf_hashes(state["algorithm"])


def _murmur(root: Path, plugins: Path, arguments: list[str]) -> None:
    """Run a command of a checkout, which can import the modules of a folder.

    Raises:
        RunError: if it fails.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MURMUR", "PYTHONPATH"))}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "murmur", *arguments],
        cwd=root,
        env=env | {"PYTHONPATH": os.pathsep.join([str(root), str(plugins)])},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RunError(f"exit code {done.returncode}: {lines[-1] if lines else 'no message'}")


def leaf_hashes(state: Any) -> dict[str, str]:
    """SHA-256 of each tensor and number, by its old name, in the order of names."""
    pairs = json.loads(NAMES.read_text(encoding="utf-8"))
    found = {}
    for path, value in _leaves(state, ""):
        name = path
        for old, new in pairs:
            if path.startswith(f"/{new}"):
                name = f"/{old}{path.removeprefix(f'/{new}')}"
        assert name not in found, f"two tensors are called {name}; correct {NAMES.name}"
        found[name] = hashlib.sha256(_content(value)).hexdigest()
    return dict(sorted(found.items()))


def total_hash(hashes: Mapping[str, str]) -> str:
    """SHA-256 of the names and hashes of all tensors."""
    return hashlib.sha256(json.dumps(dict(sorted(hashes.items()))).encode()).hexdigest()


def digest(state: Any) -> str:
    """SHA-256 of tensors and numbers, by name, in the order of their names."""
    return total_hash(leaf_hashes(state))


def _content(value: Any) -> bytes:
    if not isinstance(value, torch.Tensor):
        return repr(value).encode()
    kind = f"{value.dtype}{tuple(value.shape)}".encode()
    if not value.dim():
        return kind + repr(value.item()).encode()
    return kind + value.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key in sorted(node, key=str):
            yield from _leaves(node[key], f"{path}/{key}")
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for i, value in enumerate(node):
            yield from _leaves(value, f"{path}/{i}")
    else:
        yield path, node


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the names of tensors that differ or that one side lacks."""
    return [
        name
        if name in ours and name in theirs
        else f"{name} ({'ours' if name in ours else 'theirs'} alone)"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def this_machine() -> str:
    """Return the key of this machine in EXPECTED: version of torch and kind of CPU."""
    version = torch.__version__.partition("+")[0]
    return f"torch {version}, {torch.backends.cpu.get_cpu_capability()}"


def _hashes(root: Path, name: str) -> dict[str, str] | str:
    """Return what a case learned in a checkout, or why it cannot run there."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return train(root.resolve(), CASES[name], Path(folder))
        except RunError as error:
            return str(error)


def _verdict(ours: dict[str, str] | str, theirs: dict[str, str] | str) -> str:
    """Return one line: equal, different and where, or who cannot run the case."""
    if isinstance(ours, str) or isinstance(theirs, str):
        sides = {"here": ours, "there": theirs}
        why = "; ".join(f"{side}: {x}" for side, x in sides.items() if isinstance(x, str))
        return f"not run {why}"
    names = differences(ours, theirs)
    if not names:
        return "equal"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"different in {', '.join(names[:SHOWN])}{more}"


def main() -> int:
    """Run the cases named, or all, and compare them; returns 1 if one differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="parts of the cases' names; none: all")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout that trains")
    parser.add_argument("--against", type=Path, help="another checkout to compare with")
    parser.add_argument("--twice", action="store_true", help="compare each case with itself")
    parser.add_argument("--save", action="store_true", help=f"write {EXPECTED.name}")
    parser.add_argument("--out", type=Path, help="write the hashes into this file, too")
    given = parser.parse_intermixed_args()
    saved = json.loads(EXPECTED.read_text(encoding="utf-8")) if EXPECTED.exists() else {}
    expected, found, bad = saved.get(this_machine(), {}), {}, 0
    for name in CASES:
        if given.names and not any(part in name for part in given.names):
            continue
        ours = _hashes(given.root, name)
        if isinstance(ours, dict):
            found[name] = total_hash(ours)
        if given.against or given.twice:
            verdict = _verdict(ours, _hashes(given.against or given.root, name))
        elif isinstance(ours, str):
            verdict = f"not run here: {ours}"
        elif given.save or name not in expected:
            verdict = "saved" if given.save else "not in the file of expected hashes"
        else:
            verdict = "equal" if expected[name] == found[name] else "different"
        bad += verdict.startswith(("different", "not run here"))
        print(f"{found.get(name, '')[:16]:16}  {name}: {verdict}", flush=True)
        if given.out:
            given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        if given.save:
            kept = {case: x for case, x in {**expected, **found}.items() if case in CASES}
            saved[this_machine()] = dict(sorted(kept.items()))
            EXPECTED.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
