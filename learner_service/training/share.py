"""What one learner of a group has of the whole: options, environments, turns to measure in."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from learner_service.algorithms.base import Algorithm, algorithm_config, with_options
from learner_service.group.group import Group
from learner_service.tools.precision import Measure, fit_precision
from shared.config.experiment import ExperimentConfig
from shared.errors import ConfigError
from shared.samples import SampleSpec
from shared.spec import EnvSpec

_PRECISIONS = ("auto", "fp32", "bf16", "fp16")


def share_of(config: ExperimentConfig, group: Group) -> ExperimentConfig:
    """The configuration with one rank's part of the options that are of the whole group.

    Raises:
        ConfigError: if an option cannot be divided.
    """
    if group.size == 1:
        return config
    return with_options(config, algorithm_config(config.algorithm).for_rank(group.size))


def environments_of(config: ExperimentConfig, group: Group) -> int:
    """Training environments of one environment server that a rank has: worker i's are rank i mod N.

    0 while the number of workers is not chosen.

    Raises:
        ConfigError: if a sync run has a rank without environments.
    """
    server = config.env_server
    if config.learner.pipeline == "sync" and server.num_workers < group.size:
        raise ConfigError(
            f"{group.size} learners in the sync pipeline need as many workers: "
            f"env_server.num_workers={server.num_workers}; set it to {group.size} or more"
        )
    return len(range(group.rank, server.num_workers, group.size)) * server.envs_per_worker


@contextmanager
def rank_0_first(group: Group) -> Iterator[None]:
    """Rank 0 does what follows before the others do: they find what it has written."""
    if group.rank:
        group.barrier()
    yield
    if not group.rank:
        group.barrier()


def with_precision(
    config: ExperimentConfig,
    group: Group,
    spec: EnvSpec | SampleSpec,
    run_dir: Path,
    device: torch.device,
    measure: Measure,
) -> ExperimentConfig:
    """The configuration with the fastest precision on rank 0, if it says auto.

    Args:
        config: of the whole group.
        group: of learners.
        spec: see `fit_precision`, as all that follow.
        run_dir: where the choice is kept.
        device: what the run learns on.
        measure: seconds of an update.
    """
    with rank_0_first(group):
        own = fit_precision(share_of(config, group), spec, run_dir, device, measure)
    name = _PRECISIONS[group.of_rank_0(_PRECISIONS.index(own.learner.precision))]
    return config.changed({"learner.precision": name})


def begin_alike(algorithm: Algorithm[Any], group: Group) -> None:
    """Give all ranks the networks of rank 0."""
    parts = [part for part in algorithm.parts.values() if isinstance(part, nn.Module)]
    group.broadcast_([p for part in parts for p in (*part.parameters(), *part.buffers())])
