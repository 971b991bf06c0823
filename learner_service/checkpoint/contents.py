"""Contents of a checkpoint: its environment or data set, its configuration, its algorithm."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from google.protobuf.message import DecodeError

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, Policy, build_algorithm
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.plugin_folders import named_code, refused_code
from murmur.shared.config.section import validate
from murmur.shared.config.text import NO_YAML, plain_data, read_config_text
from murmur.shared.process.errors import CheckpointError, MurmurError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.samples import SampleSpec, samples_from_proto, samples_to_proto
from murmur.shared.wire.spec import (
    EXPERT_ACTION,
    EnvSpec,
    first_difference,
    spec_from_proto,
    spec_to_proto,
    without_expert,
)


@contextlib.contextmanager
def _reading(lacks: str, whose: str = "the checkpoint") -> Iterator[None]:
    """Say that a checkpoint is not murmur's if the block cannot read what it says of its run.

    Raises:
        CheckpointError: if the block fails.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError, DecodeError, MurmurError, *NO_YAML) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"{whose} {lacks} ({reason}), so murmur did not write it; pick another with "
            "--checkpoint"
        ) from None


def spec_text(spec: EnvSpec) -> str:
    """A spec as a checkpoint keeps it: hexadecimal, since weights_only reads no bytes."""
    return spec_to_proto(spec).SerializeToString(deterministic=True).hex()


def saved_spec(state: Mapping[str, Any]) -> EnvSpec:
    """The spec a checkpoint was made with.

    Raises:
        CheckpointError: if it names none: something else than murmur wrote it.
    """
    if "source" in state:
        raise CheckpointError(
            "the checkpoint is of a run with a source, not with an environment; use the "
            "configuration it was trained with, or start a new run"
        )
    with _reading("names no environment"):
        return spec_from_proto(pb.EnvSpec.FromString(bytes.fromhex(state["spec"])))


def saved_game(path: Path, state: Mapping[str, Any]) -> EnvSpec:
    """Return the spec of all agents of a league's games, from a checkpoint of such a run.

    Raises:
        CheckpointError: if it is of no such run.
    """
    if "game" not in state:
        raise CheckpointError(
            f"checkpoint {path} is of a run without league.agents: it does not say which agents of "
            "a game its policy acts for; leave league.agents out"
        )
    with _reading("names no game"):
        return spec_from_proto(pb.EnvSpec.FromString(bytes.fromhex(state["game"])))


def check_spec(path: Path, state: dict[str, Any], spec: EnvSpec) -> None:
    """Compare a checkpoint's spec with an environment's.

    Raises:
        CheckpointError: naming the first difference.
    """
    saved = saved_spec(state)
    difference = first_difference(saved, spec)
    if difference and not first_difference(without_expert(saved), without_expert(spec)):
        before, now = ("with" if s.observation(EXPERT_ACTION) else "without" for s in (saved, spec))
        raise CheckpointError(
            f"checkpoint {path} is of a run {before} imitation, this one is {now}; set "
            "imitation.baseline as it was: imitation ends by itself after imitation.updates"
        )
    if difference:
        raise CheckpointError(
            f"checkpoint {path} is of another environment: {difference}; "
            "use the configuration it was trained with, or start a new run"
        )


def source_text(spec: SampleSpec) -> str:
    """The spec of a data set as a checkpoint keeps it; see spec_text."""
    return samples_to_proto(spec).SerializeToString(deterministic=True).hex()


def saved_source(state: Mapping[str, Any]) -> SampleSpec:
    """The data set a checkpoint of a supervised run was made with.

    Raises:
        CheckpointError: if it names none.
    """
    if "source" not in state:
        raise CheckpointError(
            "the checkpoint is of a run in an environment, the configuration has a source; use "
            "the configuration it was trained with, or start a new run"
        )
    with _reading("names no data set"):
        return samples_from_proto(pb.SampleSpec.FromString(bytes.fromhex(state["source"])))


def saved_sections(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The configuration of a checkpoint's run as sections, not checked.

    Raises:
        CheckpointError: if it has none: something else than murmur wrote it.
    """
    with _reading("has no configuration", f"checkpoint {name}"):
        return read_config_text(state["config"], f"checkpoint {name}")


def saved_config(state: Mapping[str, Any], name: str) -> ExperimentConfig:
    """The configuration of a checkpoint's run; see saved_sections.

    Raises:
        MurmurError: if it has none, or one of another release.
    """
    return validate(ExperimentConfig, saved_sections(state, name), name)


def buildable_config(state: Mapping[str, Any], name: str) -> ExperimentConfig:
    """The same, if its algorithm and network may be built here.

    Raises:
        MurmurError: as saved_config, or if it names code that no configuration does.
    """
    config = saved_config(state, name)
    for named in named_code([config.algorithm.model_dump(), config.network.model_dump()]):
        if reason := refused_code(named):
            raise CheckpointError(f"checkpoint {name} names '{named}', {reason}")
    return config


def load_algorithm(
    path: Path, state: dict[str, Any], config: ExperimentConfig, algorithm: Algorithm[Any]
) -> None:
    """Give a configured algorithm what a checkpoint holds of it.

    Raises:
        CheckpointError: if it does not fit, naming what is configured otherwise.
    """
    saved = saved_sections(state, path.name)
    name, here = saved["algorithm"]["name"], config.algorithm.name
    frozen, frozen_here = (
        list(options.get("frozen_agents", ()))
        for options in (saved["algorithm"], config.algorithm.options)
    )
    if frozen != frozen_here:  # what the optimiser remembers of them would move their weights
        reason = f"algorithm.frozen_agents: {frozen} there, {frozen_here} here"
        raise CheckpointError(
            f"checkpoint {path} does not fit the configuration: {reason}; start a new run from it "
            "with --from"
        )
    if name == here:
        try:
            algorithm.load_state_dict(state["algorithm"])
            return
        except (KeyError, RuntimeError, ValueError) as error:
            reason = _differences(saved, config) or " ".join(str(error).split())[:200]
    else:
        reason = f"algorithm.name: {name} there, {here} here"
    raise CheckpointError(
        f"checkpoint {path} does not fit the configuration: {reason}; "
        "use the configuration it was trained with, or start a new run"
    )


def saved_policy(
    name: str, state: Mapping[str, Any], precision: Precision, device: torch.device
) -> tuple[Policy, ExperimentConfig]:
    """The policy of a checkpoint, whatever algorithm and network it has, and its configuration.

    Args:
        name: checkpoint's name, for messages.
        state: contents of the checkpoint.
        precision: precision to act in.
        device: device to act on.

    Raises:
        MurmurError: if this murmur cannot build it, or it names code that no configuration does.
    """
    config = buildable_config(state, name)
    algorithm = build_algorithm(
        config.algorithm,
        saved_spec(state),
        config.network,
        precision,
        device,
        config.run.seed,
    )
    load_saved_algorithm(algorithm, state, name, config)
    return algorithm.evaluated(), config


def load_saved_algorithm(
    algorithm: Algorithm[Any], state: Mapping[str, Any], name: str, config: ExperimentConfig
) -> None:
    """Load a checkpoint into an algorithm that was built from the checkpoint's configuration.

    Args:
        algorithm: algorithm to load into.
        state: contents of the checkpoint.
        name: name of the checkpoint, for messages.
        config: configuration of the checkpoint.

    Raises:
        CheckpointError: if another release of the algorithm wrote it.
    """
    try:
        algorithm.load_state_dict(state["algorithm"])
    except (KeyError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"checkpoint {name} does not fit this release's '{config.algorithm.name}': {reason}; "
            "use the release it was saved by"
        ) from None


def _differences(saved: dict[str, Any], config: ExperimentConfig) -> str:
    """Describe how algorithm and network settings differ from those of a checkpoint."""
    found, now = [], plain_data(config)
    for section in ("algorithm", "network"):
        there, here = saved[section], now[section]
        for key in sorted(there.keys() | here.keys()):
            a, b = (values.get(key, "its default") for values in (there, here))
            if a != b:
                found.append(f"{section}.{key}: {a} there, {b} here")
    return "; ".join(found)
