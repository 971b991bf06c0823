"""Precision and batch size of a run, and each rank's part of its options."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from learner_service.learning.base import algorithm_config, grown, with_options
from learner_service.ranks.group import Group
from learner_service.tuning.batch_size import fit_batch_size
from learner_service.tuning.precision import Measure, fit_precision
from learner_service.tuning.probe import update_seconds
from shared.config.experiment import ExperimentConfig
from shared.process.process import logger
from shared.wire.samples import SampleSpec
from shared.wire.spec import EnvSpec

_PRECISIONS = ("auto", "fp32", "bf16", "fp16")


def share_of(config: ExperimentConfig, group: Group) -> ExperimentConfig:
    """Return the configuration with one rank's part of the options that are the whole group's.

    Raises:
        ConfigError: if an option cannot be divided.
    """
    if group.size == 1:
        return config
    return with_options(config, algorithm_config(config.algorithm).for_rank(group.size))


def fit(
    config: ExperimentConfig, group: Group, spec: EnvSpec, run_dir: Path, device: torch.device
) -> tuple[ExperimentConfig, ExperimentConfig]:
    """Choose the fastest precision if it is auto, and the largest batch if its size is 0.

    Minibatches are as large as the number of environments makes them.

    Args:
        config: experiment of the whole group.
        group: learners of the run.
        spec: spec of the environment.
        run_dir: folder where choices are kept.
        device: device that the run learns on.

    Returns:
        the configuration in that precision; and this rank's share of it, batch size included.
    """
    whole = grown(config, spec)
    if whole is not config and not group.rank:
        size, asked = (algorithm_config(c.algorithm).about.learned_at_once for c in (whole, config))
        logger.info(
            "%d environments: a minibatch has %d agent-transitions, %d times those configured; "
            "learning rates are %.3g times as large",
            whole.total_envs,
            size,
            size // asked,
            math.sqrt(size / asked),
        )
    whole = with_precision(whole, group, spec, run_dir, device, update_seconds)
    own = share_of(whole, group)
    with rank_0_first(group):
        fitted = fit_batch_size(own, spec, run_dir)
    options = algorithm_config(own.algorithm)
    if group.size > 1 and options.about.open_batch_size:
        found = algorithm_config(fitted.algorithm).about.learned_at_once
        size = round(group.agree({"rows": float(found)}, "min")["rows"])
        fitted = with_options(own, options.changed({options.about.batch_size: size}))
    return config.changed({"learner.precision": whole.learner.precision}), fitted


def with_precision(
    config: ExperimentConfig,
    group: Group,
    spec: EnvSpec | SampleSpec,
    run_dir: Path,
    device: torch.device,
    measure: Measure,
) -> ExperimentConfig:
    """Return the configuration with the fastest precision on rank 0, if it says auto.

    Args:
        config: experiment of the whole group.
        group: learners of the run.
        spec: spec of the environment or source.
        run_dir: folder where the choice is kept.
        device: device that the run learns on.
        measure: returns seconds of an update.
    """
    with rank_0_first(group):
        own = fit_precision(share_of(config, group), spec, run_dir, device, measure)
    name = _PRECISIONS[group.of_rank_0(_PRECISIONS.index(own.learner.precision))]
    return config.changed({"learner.precision": name})


@contextmanager
def rank_0_first(group: Group) -> Iterator[None]:
    """Let rank 0 run the block before the others: they find what it has written."""
    if group.rank:
        group.barrier()
    yield
    if not group.rank:
        group.barrier()
