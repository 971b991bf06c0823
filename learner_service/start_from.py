"""Fine-tuning: gives the networks of a new run the weights of a checkpoint.

Networks, target networks, temperatures and the statistics of normalisers are taken tensor by
tensor, by name and shape. Optimisers, counters, schedules and the replay start fresh.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from murmur.learner_service.checkpoint import files
from murmur.learner_service.checkpoint.contents import saved_config, saved_source, saved_spec
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.layers.building import observed_image, resolved_name
from murmur.learner_service.layers.dense import DEFAULT as DENSE
from murmur.learner_service.learning.base import Algorithm
from murmur.learner_service.tuning.resolve import with_learner_options
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.text import one_line
from murmur.shared.process.errors import CheckpointError, ConfigError
from murmur.shared.process.files import write_whole
from murmur.shared.process.process import logger
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import EnvSpec, agent_order, first_difference, without_expert

STARTED_FROM = "started_from.json"  # in the run's folder
_SHOWN = 6  # tensors that the screen names; the log and the file name all
# Of networks: without effect on what trained weights compute.
_MAY_DIFFER = {"initialization", "output_gain", "dropout"}
_OPTION = "run.start_from (--from)"


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a new run starts from.

    Attributes:
        path: its file.
        state: content of the file.
        config: the configuration it was trained with.
    """

    path: Path
    state: Mapping[str, Any]
    config: ExperimentConfig


@dataclass(frozen=True)
class Started:
    """Tensors that a run took from a checkpoint, and tensors it left.

    Attributes:
        taken: name of a tensor -> its shape.
        fresh: name -> its shape here and in the checkpoint; None: the checkpoint has none.
    """

    taken: dict[str, list[int]]
    fresh: dict[str, tuple[list[int], list[int] | None]]


def load_origin(config: ExperimentConfig) -> Origin | None:
    """Read the checkpoint of run.start_from: a file, or the best one of a run's folder.

    Args:
        config: configuration of the new run.

    Returns:
        the checkpoint, or None if the option is empty.

    Raises:
        CheckpointError: if there is none, or it cannot be read.
        ConfigError: if it is of another algorithm.
    """
    wanted = config.run.start_from
    if not wanted:
        return None
    path = Path(wanted)
    if path.is_dir():
        folder = CheckpointFolder(path, 1)
        if not folder.has_checkpoint():
            raise CheckpointError(
                f"{_OPTION} = {wanted}: the folder has no checkpoint; name a run that has one"
            )
        path = folder.find("best")
    elif not path.is_file():
        raise CheckpointError(
            f"{_OPTION} = {wanted}: there is no such file; name a checkpoint or a run's folder"
        )
    state = files.load(path)
    if "config" not in state or "algorithm" not in state:
        raise CheckpointError(f"{_OPTION} = {path}: it is no checkpoint of a policy")
    there = saved_config(state, str(path))
    if there.algorithm.name != config.algorithm.name:
        raise ConfigError(
            f"{_OPTION} = {path} was trained by algorithm '{there.algorithm.name}', the "
            f"configuration has '{config.algorithm.name}'; set "
            f"algorithm.name={there.algorithm.name}, or start without it"
        )
    return Origin(path.resolve(), state, there)


def start_from(
    origin: Origin,
    config: ExperimentConfig,
    spec: EnvSpec | SampleSpec,
    algorithm: Algorithm[Any],
    run_dir: Path,
) -> None:
    """Give a run's algorithm the weights of a checkpoint, and say which.

    Args:
        origin: checkpoint.
        config: configuration of the run.
        spec: spec of its environment or source.
        algorithm: algorithm with untrained networks.
        run_dir: folder of the run.

    Raises:
        MurmurError: if the checkpoint has another network, or nothing of the policy fits.
    """
    before: EnvSpec | SampleSpec
    if isinstance(spec, SampleSpec):
        before = saved_source(origin.state)
        other = f"source '{spec.name}' here, '{before.name}' there"
        difference = None if before == spec else other
        there, here = (
            DENSE if c.network.name == "auto" else c.network.name for c in (origin.config, config)
        )
    else:
        before = saved_spec(origin.state)
        difference = first_difference(without_expert(spec), without_expert(before))
        if agent_order(spec, before):  # the run takes it where agents share networks
            raise ConfigError(
                f"{_OPTION} = {origin.path} has the agents in another order: {difference}"
            )
        there = resolved_name(origin.config.network, observed_image(before))
        here = resolved_name(config.network, observed_image(spec))
    if there != here:  # looked at before the module that a checkpoint names is imported
        raise ConfigError(
            f"{_OPTION} = {origin.path} has network '{there}', the configuration '{here}'; set "
            f"network.name={there}, or start without it"
        )
    was = with_learner_options(origin.config, before).network.options
    now = with_learner_options(config, spec).network.options
    keys = sorted((was.keys() | now.keys()) - _MAY_DIFFER)
    if differ := [key for key in keys if was.get(key) != now.get(key)]:
        words = "; ".join(f"network.{k}: {was.get(k)} there, {now.get(k)} here" for k in differ)
        fix = " ".join(f"network.{key}={one_line(was.get(key))}" for key in differ)
        # The options of `auto` need the name that it stands for.
        name = f"network.name={here} " if config.network.name == "auto" else ""
        raise ConfigError(
            f"{_OPTION} = {origin.path} has another network: {words}; set {name}{fix}"
        )
    _note(origin, take_weights(origin, algorithm), difference, run_dir)


@torch.no_grad()
def take_weights(origin: Origin, algorithm: Algorithm[Any]) -> Started:
    """Give an algorithm all tensors of a checkpoint that its networks have in the same shape.

    Args:
        origin: checkpoint.
        algorithm: algorithm with untrained networks; the first of its parts is the policy's.

    Raises:
        ConfigError: if no tensor of the policy fits; the algorithm is unchanged then.
    """
    saved = origin.state["algorithm"]["parts"]
    started = Started({}, {})
    loads: list[tuple[nn.Module, dict[str, Any]]] = []
    for name, part in algorithm.parts.items():
        if not isinstance(part, nn.Module) or getattr(part, "STARTS_FRESH", False):
            continue
        own, there = part.state_dict(), saved.get(name) or {}
        fits = _fitting(part, own, there)
        for key, tensor in own.items():
            full, shape = f"{name}.{key}", list(tensor.shape)
            found = list(there[key].shape) if key in there else None
            if key in fits:
                started.taken[full] = shape
                own[key] = there[key]
            else:
                started.fresh[full] = shape, found
        if not loads and not any(full.startswith(f"{name}.") for full in started.taken):
            raise ConfigError(
                f"{_OPTION} = {origin.path}: no tensor of the policy fits: "
                f"{_fresh_text(started, _SHOWN)}; start from a checkpoint of such a network and "
                "environment, or without it"
            )
        loads.append((part, own))
    for part, state in loads:
        part.load_state_dict(state)
    return started


def _fitting(part: nn.Module, own: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> set[str]:
    """Return names of tensors that both have in the same shape; of statistics all or none."""
    fits = {key for key, x in own.items() if key in there and there[key].shape == x.shape}
    for name, module in part.named_modules():
        if getattr(module, "TAKEN_WHOLE", False):
            whole = {".".join(filter(None, (name, key))) for key in module.state_dict()}
            fits -= set() if whole <= fits else whole
    return fits


def _note(origin: Origin, started: Started, difference: str | None, run_dir: Path) -> None:
    """Log what was taken and what starts fresh, and keep it as started_from.json."""
    updates = origin.state.get("progress", {}).get("updates", 0)
    number = len(started.taken) + len(started.fresh)
    words = [
        f"started from {origin.path} (run '{origin.config.run.name}', {updates} updates): "
        f"{len(started.taken)} of {number} tensors taken"
    ]
    if difference:
        words.append(f"what it was trained on differs: {difference}")
    if started.fresh:
        words.append(f"these start fresh: {_fresh_text(started, _SHOWN)}")
    kept = {
        "checkpoint": str(origin.path),
        "run": origin.config.run.name,
        "updates": updates,
        "words": words,
        "taken": started.taken,
        "fresh": {k: {"here": here, "there": there} for k, (here, there) in started.fresh.items()},
    }
    write_whole(run_dir / STARTED_FROM, json.dumps(kept, indent=1))
    for line in words[: 1 + bool(difference)]:
        logger.info("%s", line)
    logger.info("taken: %s", ", ".join(f"{k} {v}" for k, v in started.taken.items()))
    if started.fresh:
        logger.info("fresh: %s", _fresh_text(started, len(started.fresh)))


def _fresh_text(started: Started, most: int) -> str:
    """Name the first of the tensors that start fresh, with their shapes."""
    shown = [
        f"{name} {here} ({'not there' if there is None else f'{there} there'})"
        for name, (here, there) in list(started.fresh.items())[:most]
    ]
    left = len(started.fresh) - len(shown)
    return ", ".join(shown) + (f", and {left} more ({STARTED_FROM})" if left else "")
