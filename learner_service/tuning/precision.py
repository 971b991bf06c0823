"""The fastest precision: `learner.precision: auto` on CUDA, in the async pipeline.

bf16 is no rule: it adds casts, which small networks pay for and do not gain from.
So whole updates are timed, on synthetic rows, in each precision that the device has.
"""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from learner_service.device.device import half_precision
from learner_service.learning.base import algorithm_config, with_options
from learner_service.tuning.probe import depends_on, update_seconds
from shared.config.experiment import AugmentConfig, ExperimentConfig
from shared.process.files import read_json
from shared.process.process import logger
from shared.wire.samples import SampleSpec
from shared.wire.spec import EnvSpec

_CACHE = "precision.json"
_GAIN = 1.05  # at least so much faster than fp32, which is the more exact
_BATCH = 2048  # rows of a batch whose size is still to be found

Measure = Callable[[ExperimentConfig, Any], float]


def fit_precision(
    config: ExperimentConfig,
    spec: EnvSpec | SampleSpec,
    run_dir: Path,
    device: torch.device,
    measure: Measure = update_seconds,
) -> ExperimentConfig:
    """Replace the precision `auto` by the one in which updates are fastest.

    Measured once for each run, also if it is resumed; again only where something has changed that
    the choice depends on: the device, torch, the algorithm, the network, the environment or source,
    or the augmentation. On the
    CPU, and in the sync pipeline, which uses nothing measured, `auto` stays: see
    `resolve_precision`.

    Args:
        config: the experiment.
        spec: its environment's or source's.
        run_dir: folder that keeps the choice.
        device: device that the run learns on.
        measure: seconds of an update from a configuration and the spec; infinity if it does not
            fit the device.

    Raises:
        MurmurError: if the settings do not fit each other.
    """
    learner = config.learner
    if learner.precision != "auto" or learner.pipeline == "sync" or device.type != "cuda":
        return config
    cache, found_for = run_dir / _CACHE, _depends_on(config, spec, device)
    saved = read_json(cache)
    if saved.get("found_for") != found_for:
        trial, seconds = _trial(config), dict[str, float]()
        for name in ("fp32", half_precision()):
            seconds[name] = measure(trial.changed({"learner.precision": name}), spec)
            gc.collect()  # what torch keeps for the next tensors would not count as free
            torch.cuda.empty_cache()
        saved = {"precision": fastest(seconds), "found_for": found_for}
        logger.info(
            "precision %s: an update takes %s",
            saved["precision"],
            ", ".join(f"{s * 1e3:.2f} ms in {name}" for name, s in seconds.items()),
        )
        cache.write_text(json.dumps(saved))
    return config.changed({"learner.precision": saved["precision"]})


def fastest(seconds: dict[str, float]) -> str:
    """fp32, unless another precision is faster by 5 %; seconds of an update by precision."""
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds["fp32"] >= _GAIN * seconds[best] else "fp32"


def _trial(config: ExperimentConfig) -> ExperimentConfig:
    """The configuration with one pass over the data, and a batch size if it has none yet."""
    options = algorithm_config(config.algorithm)
    about = options.about
    size = {about.batch_size: _BATCH} if about.open_batch_size else {}
    return with_options(config, options.changed({**about.trial, **size}))


def _depends_on(
    config: ExperimentConfig, spec: EnvSpec | SampleSpec, device: torch.device
) -> dict[str, Any]:
    """Return what the choice depends on, as it is read back from JSON."""
    augment = config.augment.model_dump(mode="json")
    return depends_on(
        config,
        spec,
        device=torch.cuda.get_device_properties(device).name,
        torch=torch.__version__,
        cuda_graph=config.learner.cuda_graph,
        compile=config.learner.compile,
        **({} if config.augment == AugmentConfig() else {"augment": augment}),
    )
