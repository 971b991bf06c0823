"""The contract of an algorithm that learns from the samples of a source.

Such a plug-in is an algorithm (see murmur.learner_service.learning.base) whose module also has

    SUPERVISED = True
    Config      a subclass of SupervisedConfig
    build(config, spec, network, precision, device, seed)  -> Supervised, for a shared SampleSpec

`build_supervised` builds the configured one.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from types import ModuleType

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.device.memory import learning_from
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm
from murmur.learner_service.learning.options import About, AlgorithmConfig
from murmur.learner_service.preprocess.augment.base import Augment
from murmur.learner_service.preprocess.augment.building import build_augment
from murmur.learner_service.storage.samples import SampleBatch
from murmur.learner_service.telemetry.figures import Figures
from murmur.shared.config.experiment import NO_AUGMENT, ExperimentConfig
from murmur.shared.config.plugins import load_plugin, plugin_failures, plugin_names, resolve_plugin
from murmur.shared.process.errors import ConfigError, SpecError
from murmur.shared.wire.samples import IMAGE, MASK, SampleSpec


class SupervisedConfig(AlgorithmConfig):
    """Options of every algorithm that learns from samples."""

    epochs: int = Field(200, ge=1, description="passes over the training split; the run then ends")
    batch_size: int = Field(32, ge=1, description="samples of an update, of all learners together")
    evaluate_every_epochs: int = Field(
        1, ge=1, description="epochs between evaluations on the validation split; the last always"
    )

    @property
    @override
    def about(self) -> About:
        return About(divided=("batch_size",))


class Supervised(Algorithm[SampleBatch]):
    """Learns from batches of samples. Used by the thread that learns.

    Attributes:
        metrics: names of what `evaluate` returns; evaluation.best_metric "return", the default,
            stands for the first one.
        finished: whether training should end before `epochs`, as no evaluation gets better;
            looked at after each evaluation.
        augment: first change of each batch in `update`, with the algorithm's generator; None:
            nothing. `build_supervised` sets it.
    """

    metrics: tuple[str, ...]
    finished: bool = False
    augment: Augment | None = None
    unroll_length = 0
    rows_per_update = 0

    @abstractmethod
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Scores of the network on a split; not augmented.

        Args:
            batches: image [B, 3, H, W] uint8 and mask [B, H, W] uint8, on the device.

        Returns:
            a number for each of `metrics`.
        """

    def figures(self, image: Tensor, mask: Tensor) -> Figures:
        """Return figures of the latest evaluation; none unless a subclass says otherwise.

        Args:
            image: [B, 3, H, W] uint8, the first images of the split, on the device.
            mask: [B, H, W] uint8.
        """
        return Figures()


def is_supervised(module: ModuleType) -> bool:
    """Whether an algorithm plug-in learns from samples, not from an environment."""
    return bool(getattr(module, "SUPERVISED", False))


def wrong_algorithm(config: ExperimentConfig) -> ConfigError:
    """Return the error of an algorithm that does not learn from what the run has.

    It names the algorithms that do: from an environment, or from a source.
    """
    name = config.algorithm.name
    fitting = ", ".join(
        other
        for other in plugin_names("algorithm")
        if is_supervised(load_plugin("algorithm", other)) == config.supervised
    )
    wanted, given = "a source of samples", f"environment '{config.environment.name}'"
    if config.supervised:
        wanted, given = "an environment", f"source '{config.source.name}'"
    return ConfigError(
        f"algorithm '{name}' learns from {wanted}, the run has {given}; set algorithm.name to one "
        f"of: {fitting}"
    )


def supervised_config(config: ExperimentConfig) -> SupervisedConfig:
    """The checked options of a supervised run's algorithm.

    Raises:
        ConfigError: for an unknown algorithm or option.
    """
    plugin = resolve_plugin("algorithm", config.algorithm)
    if not is_supervised(plugin.module):
        raise wrong_algorithm(config)
    options = plugin.options
    if not isinstance(options, SupervisedConfig):
        raise ConfigError(
            f"algorithm '{config.algorithm.name}' learns from samples: derive its Config from "
            "murmur.learner_service.learning.supervised.SupervisedConfig"
        )
    return options


def build_supervised(
    config: ExperimentConfig, spec: SampleSpec, precision: Precision, device: torch.device
) -> Supervised:
    """The configured algorithm for the samples of a source, with its augmentation.

    Raises:
        ConfigError: for an unknown algorithm, network or option, or one that does not fit.
        SpecError: if the algorithm cannot learn from such samples, or has not the memory to.
    """
    name = config.algorithm.name
    module, options = load_plugin("algorithm", name), supervised_config(config)
    at_once = learning_from(options.batch_size, device, precision.dtype.itemsize)
    with plugin_failures(f"algorithm '{name}'"), at_once:
        algorithm: Supervised = module.build(
            options, spec, config.network, precision, device, config.run.seed
        )
    if config.augment != NO_AUGMENT:
        algorithm.augment = build_augment(config.augment, spec, device)
    return algorithm


def image_size(spec: SampleSpec) -> tuple[int, int]:
    """Height and width of a data set's images.

    Raises:
        SpecError: if its samples are not RGB images with masks of their size.
    """
    image, mask = spec.array(IMAGE), spec.array(MASK)
    for name, array in ((IMAGE, image), (MASK, mask)):
        if array is None or array.dtype != "uint8":
            raise SpecError(
                f"segmentation needs samples with '{IMAGE}' uint8 [3, H, W] and '{MASK}' uint8 "
                f"[H, W]; source '{spec.name}' has no such '{name}'"
            )
    assert image is not None
    assert mask is not None
    if len(image.shape) != 3 or image.shape[0] != 3 or mask.shape != image.shape[1:]:
        raise SpecError(
            f"segmentation needs '{IMAGE}' [3, H, W] and '{MASK}' [H, W] of one size; source "
            f"'{spec.name}' has {image.shape} and {mask.shape}"
        )
    return image.shape[1], image.shape[2]


def class_weights(given: Sequence[float], spec: SampleSpec) -> Tensor:
    """[K] configured weights of the classes; ones if there are none.

    Raises:
        ConfigError: if there is not one for each class.
    """
    classes = spec.classes
    if given and len(given) != len(classes):
        raise ConfigError(
            f"algorithm.class_weights has {len(given)} numbers, source '{spec.name}' has "
            f"{len(classes)} classes ({', '.join(classes)}); give one for each"
        )
    return torch.tensor(given or [1.0] * len(classes))
