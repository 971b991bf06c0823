"""The configuration of a run, resolved: with what its plug-ins take, and what was chosen for it."""

import gc
import math
from pathlib import Path

import torch

from murmur.learner_service.device.device import half_precision
from murmur.learner_service.layers.building import observed_image, resolve_network
from murmur.learner_service.layers.dense import dense_plugin
from murmur.learner_service.learning.base import algorithm_config, grown, with_options
from murmur.learner_service.learning.supervised import is_supervised, wrong_algorithm
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.storage.flight import Flight
from murmur.learner_service.tuning.batch_size import largest_batch
from murmur.learner_service.tuning.probe import depends_on, kept_choice, update_seconds
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import NO_AUGMENT, ExperimentConfig
from murmur.shared.config.plugins import resolve_plugin
from murmur.shared.config.text import plain_data
from murmur.shared.process.process import logger
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import EnvSpec

_PRECISIONS = ("auto", "fp32", "bf16", "fp16")
_CACHE = "precision.json"
_GAIN = 1.05  # speed over fp32 that a less exact precision must reach
_BATCH = 2048  # rows of a batch whose size is still to be found


def with_learner_options(
    config: ExperimentConfig, spec: EnvSpec | SampleSpec | None = None
) -> ExperimentConfig:
    """Complete the configuration with all options of algorithm and network.

    Args:
        config: configuration as given, or resolved before.
        spec: spec of the environment or source, by which `auto` stands for a network; None: not
            known yet, `auto` stays.

    Raises:
        ConfigError: for an unknown algorithm, network or option, or an algorithm that does not
            learn from what the run has.
    """
    algorithm, network = resolve_plugin("algorithm", config.algorithm), config.network
    if is_supervised(algorithm.module) != config.supervised:
        raise wrong_algorithm(config)
    plugins = [algorithm]
    if network.name != "auto" or spec is not None:
        image = observed_image(spec) if isinstance(spec, EnvSpec) else None
        net = dense_plugin(network) if config.supervised else resolve_network(network, image)
        plugins.append(net)
    return config.changed(
        {p.kind: PluginConfig(name=p.name, **plain_data(p.options, p.kind)) for p in plugins}
    )


def with_flight(config: ExperimentConfig, flight: Flight) -> ExperimentConfig:
    """Return the configuration with the unrolls and the policy lag that the warm-up chose."""
    asked = algorithm_config(config.algorithm)
    chosen = flight.unroll_steps, flight.unrolls_per_update
    asked = asked.changed(dict(zip(asked.about.flight, chosen, strict=False)))
    return with_options(config, asked).changed({"learner.max_policy_lag": flight.max_policy_lag})


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
        the configuration with every option, in that precision; and this rank's share of it, with
        minibatches and batch size chosen.
    """
    resolved = with_learner_options(config, spec)
    whole = grown(resolved, spec)
    if whole is not resolved and not group.rank:
        size, asked = (
            algorithm_config(c.algorithm).about.learned_at_once for c in (whole, resolved)
        )
        logger.info(
            "%d environments: a minibatch has %d agent-transitions, %d times those configured; "
            "learning rates are %.3g times as large",
            whole.total_envs,
            size,
            size // asked,
            math.sqrt(size / asked),
        )
    whole = with_precision(whole, group, spec, run_dir, device)
    own = with_batch_size(share_of(whole, group), spec, run_dir, group)
    return resolved.changed({"learner.precision": whole.learner.precision}), own


def with_precision(
    config: ExperimentConfig,
    group: Group,
    spec: EnvSpec | SampleSpec,
    run_dir: Path,
    device: torch.device,
) -> ExperimentConfig:
    """Return the configuration with the precision in which updates are fastest, if it says auto.

    bf16 is no rule: it adds casts, which small networks pay for and do not gain from. So rank 0
    times whole updates, on synthetic rows, in each precision that its device has: once for each
    run, also if it is resumed, and again where something has changed that the choice depends on.
    On the CPU, and in the sync pipeline, which uses nothing measured, `auto` stays: see
    `Precision.of`.

    Args:
        config: experiment of the whole group.
        group: learners of the run.
        spec: spec of the environment or source.
        run_dir: folder where the choice is kept.
        device: device that the run learns on.

    Raises:
        MurmurError: if the settings do not fit each other.
    """
    learner, name = config.learner, "auto"
    if learner.precision != "auto" or learner.pipeline == "sync" or device.type != "cuda":
        return config
    if not group.rank:
        name = _fastest_precision(share_of(config, group), spec, run_dir / _CACHE, device)
    name = _PRECISIONS[group.of_rank_0(_PRECISIONS.index(name))]
    return config.changed({"learner.precision": name})


def with_batch_size(
    config: ExperimentConfig, spec: EnvSpec, run_dir: Path, group: Group = ALONE
) -> ExperimentConfig:
    """Return the configuration with the largest batch that fits every rank, if its size is 0.

    Args:
        config: a rank's share of the experiment.
        spec: spec of the environment.
        run_dir: folder where the choice is kept.
        group: learners of the run.

    Raises:
        MurmurError: see `largest_batch`.
    """
    options = algorithm_config(config.algorithm)
    if not (key := options.about.open_batch_size):
        return config
    size = 0 if group.rank else largest_batch(config, spec, run_dir)
    group.any_rank(False)  # the other ranks wait for what rank 0 writes
    if group.rank:
        size = largest_batch(config, spec, run_dir)
    size = round(group.agree({"rows": size}, "min")["rows"])
    return with_options(config, options.changed({key: size}))


def _fastest_precision(
    config: ExperimentConfig,
    spec: EnvSpec | SampleSpec,
    cache: Path,
    device: torch.device,
) -> str:
    """Return what was measured before, or measure it now; see `with_precision`."""

    def measured() -> str:
        options = algorithm_config(config.algorithm)
        about = options.about
        size = {key: _BATCH} if (key := about.open_batch_size) else {}
        trial = with_options(config, options.changed({**about.trial, **size}))
        seconds = dict[str, float]()
        for name in ("fp32", half_precision()):
            seconds[name] = update_seconds(trial.changed({"learner.precision": name}), spec)
            gc.collect()  # what torch keeps for the next tensors would not count as free
            torch.cuda.empty_cache()
        chosen = fastest(seconds)
        each = ", ".join(f"{s * 1e3:.2f} ms in {name}" for name, s in seconds.items())
        logger.info("precision %s: an update takes %s", chosen, each)
        return chosen

    augment = config.augment.model_dump(mode="json")
    found_for = depends_on(
        config,
        spec,
        device=torch.cuda.get_device_properties(device).name,
        torch=torch.__version__,
        cuda_graph=config.learner.cuda_graph,
        compile=config.learner.compile,
        **({} if config.augment == NO_AUGMENT else {"augment": augment}),
    )
    return kept_choice(cache, "precision", found_for, measured)


def fastest(seconds: dict[str, float]) -> str:
    """fp32, unless another precision is faster by 5 %; seconds of an update by precision."""
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds["fp32"] >= _GAIN * seconds[best] else "fp32"
