"""A run that learns from the samples of a source: one desk, one store, one learner."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from murmur.learner_service.checkpoint.contents import load_algorithm, saved_source, source_text
from murmur.learner_service.context import RunContext
from murmur.learner_service.device.memory import free_bytes, limited, room
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.images.supply import SupplyDesk
from murmur.learner_service.learning.supervised import (
    Supervised,
    SupervisedConfig,
    build_supervised,
    supervised_config,
)
from murmur.learner_service.loop import Learner
from murmur.learner_service.report import Update
from murmur.learner_service.serving.evaluation import check_best_metric
from murmur.learner_service.storage.epochs import TRAIN, VALID
from murmur.learner_service.storage.samples import (
    SampleBatch,
    SampleStore,
    choose_cache,
)
from murmur.learner_service.telemetry.figures import Figures
from murmur.learner_service.tuning.resolve import share_of, with_learner_options, with_precision
from murmur.shared.config.class_census import class_problems
from murmur.shared.process.errors import ConfigError, MurmurError, SpecError
from murmur.shared.process.ledger import enter
from murmur.shared.process.process import logger
from murmur.shared.wire.notices import Notice
from murmur.shared.wire.samples import SampleSpec

_WAIT_S = 0.2
_DRAWN = 4  # images, at most


@dataclass(eq=False)
class EndEpoch:
    """Counts epochs, evaluates at the end of every few, and tells when the run is complete.

    Attributes:
        options: options of the algorithm.
        algorithm: algorithm that learns.
        store: source of batches.
        context: counters, log and checkpoints; each rank evaluates its share of the validation
            split.
    """

    options: SupervisedConfig
    algorithm: Supervised
    store: SampleStore
    context: RunContext
    _evaluated: int = -1  # epochs trained when the latest evaluation was made
    _surveyed: tuple[bool, bool] = (False, False)  # splits whose classes were told

    def __post_init__(self) -> None:
        """Continue with the epochs that the run has trained."""
        self._epochs = self.context.progress.epochs

    def __call__(self, update: Update | None, over: bool) -> bool:
        """Evaluate at the end of every few epochs, and at the end of the run; a Step."""
        p = self.context.progress
        if update is not None:
            assert isinstance(update.batch, SampleBatch)
            self._count(update.batch)
        over |= self._complete or self.context.ranks.over
        ended, self._epochs = p.epochs != self._epochs, p.epochs
        if ended or over:
            self._survey()
        due = over or (ended and p.epochs % self.options.evaluate_every_epochs == 0)
        if due and p.epochs != self._evaluated and self.store.spec.size("valid"):
            self._evaluate()
            self._evaluated = p.epochs
        return over or self._complete

    @property
    def _complete(self) -> bool:
        """Whether all epochs are trained, or no evaluation gets better."""
        return self.context.progress.epochs >= self.options.epochs or self.algorithm.finished

    def _count(self, batch: SampleBatch) -> None:
        """Count a batch that was learned from; ranks end an epoch together."""
        p, group = self.context.progress, self.context.group
        own = {"ends": float(batch.ends_epoch), "rows": float(batch.size)}
        together = group.agree(own, "sum")
        if group.size > 1 and together["ends"] == group.size:
            self.store.end_epoch()
        self.context.ranks.count(batch.size, round(together["rows"]))
        p.env_steps_received += batch.size
        p.epochs = self.store.epoch

    def _evaluate(self) -> None:
        """Score the network on the validation split, once all of it is here."""
        enter("wait_rows")
        while not self.context.group.all_ranks(self.store.valid_ready(_WAIT_S)):
            if self.context.group.any_rank(self.context.stop.is_set()):
                return
        self._survey()
        enter("evaluate")
        with self.context.clock.working("evaluate"):
            scores = self.algorithm.evaluate(self.store.valid())
        p = self.context.progress
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        logger.info("epoch %d of %d: %s", p.epochs, self.options.epochs, shown)
        count = self.store.spec.size("valid")
        summary = {
            name: {"mean": value, "std": 0.0, "ci95": [value, value], "episodes": count}
            for name, value in scores.items()
        }
        # Rank 0 keeps the best.
        state = None if self.context.group.rank else self.context.keeper.state()
        means = self.context.report.evaluated(p.updates, p.all_env_steps, summary, self._figures)
        self.context.keeper.keep_best(means, state)

    def _survey(self) -> None:
        """Say which classes no sample of a split holds, once every sample of it has come.

        Raises:
            MurmurError: if no training sample holds any.
        """
        if all(self._surveyed):
            return
        store, spec = self.store, self.store.spec
        census, values = store.census, [*range(len(spec.classes)), spec.ignore_index]
        own: dict[str, float] = {}
        for split in (TRAIN, VALID):
            own[f"unseen {split}"] = float(store.count_unseen(split))
            own[f"looked {split}"] = float(np.count_nonzero(census.looked[split]))
            own |= {f"{split} {v}": float(census.seen[split][v]) for v in values}
        together = self.context.group.agree(own, "sum")
        counts, seen = [0, 0], np.zeros_like(census.seen)
        for split in (TRAIN, VALID):
            if not together[f"unseen {split}"]:
                counts[split] = round(together[f"looked {split}"])
                seen[split][values] = [together[f"{split} {v}"] > 0 for v in values]
        problems = class_problems(spec, seen, (counts[0], counts[1]))
        if not self.context.group.rank:
            self.context.metrics.notices.add(
                Notice("class_absent", p.subject, p.text) for p in problems
            )
        self._surveyed = (bool(counts[TRAIN]), bool(counts[VALID]))
        if counts[TRAIN] and not seen[TRAIN][: len(spec.classes)].any():
            raise MurmurError(problems[0].text)

    def epoch_figures(self) -> Mapping[str, Any]:
        """Return where the epoch stands, for the log, and set its gauges."""
        figures, metrics = self.store.figures(), self.context.metrics
        metrics.gauge("epoch").set(self.context.progress.epochs)
        metrics.gauge("epoch_samples_trained").set(figures["trained"])
        metrics.gauge("epoch_samples_remaining").set(figures["remaining"])
        return {"samples": {**figures, "epochs": self.options.epochs}}

    def _figures(self) -> Figures:
        """Draw what the algorithm makes of the first images of the validation split."""
        image, mask = next(self.store.valid())
        return self.algorithm.figures(image[:_DRAWN], mask[:_DRAWN])


class SupervisedRun:
    """A run that learns from samples.

    Attributes:
        context: parts that do not depend on the source.
        sessions: server of the sessions that send samples; its store holds the samples.
        busy: False: evaluations are made by the learner itself.
        lacks_evaluator: False: it needs none.
    """

    busy, lacks_evaluator = False, False

    def __init__(self, context: RunContext) -> None:
        """Make what there is before the first session; open the run if a checkpoint has the source.

        Raises:
            MurmurError: if the run cannot be as it is configured.
        """
        if context.serve_only:
            raise ConfigError(
                "a run with a source has no evaluation sessions to serve; `murmur evaluate` takes "
                "its checkpoints"
            )
        config = context.config
        self.context = context
        self._sync = config.learner.pipeline == "sync"
        self.sessions = SupplyDesk(
            config, context.metrics, context.progress, self.open_source, context.begin
        )
        if context.loaded:
            with limited(config.learner.memory_limit_gib):
                self._open(saved_source(context.loaded[1]))

    def open_source(self, spec: SampleSpec) -> None:
        """Begin the run with the data set of its first session. Called by the desk.

        Raises:
            SpecError: if the algorithm does not fit the samples.
        """
        with self.context.opening(source_text(spec)):
            self._open(spec)

    def _open(self, spec: SampleSpec) -> None:
        """Build algorithm, store and learner for this data set, and start learning."""
        if not spec.size("train"):
            raise SpecError(f"source '{spec.name}' has no samples in its split 'train'")
        context, group = self.context, self.context.group
        options = supervised_config(share_of(context.config, group))
        context.config = config = with_precision(
            context.config, group, spec, context.run_dir, context.device
        )
        precision = Precision.of(config.learner, context.device, group)
        precision.warn_if_slow()
        algorithm = build_supervised(share_of(config, group), spec, precision, context.device)
        context.make_ready(algorithm, spec)
        check_best_metric(config.evaluation.best_metric, "the algorithm", algorithm.metrics)
        store = self._make_store(spec, options.batch_size)
        if context.loaded:
            path, state = context.loaded
            load_algorithm(path, state, config, algorithm)
            context.progress.load_state_dict(state["progress"])
            context.folder.checkpoints.load_storage(path, state, store)
        self._count_undone()
        learner = self._make_learner(spec, options, algorithm, store)
        if store.choice.kind == "stream":
            store.on_room = self.sessions.wake
        self.sessions.store = store
        if not self._sync:
            config = config.changed({"supply.cache": store.choice.kind})
        context.resolved = with_learner_options(config, spec)
        context.start_threads(f"source '{spec.name}'", precision.name, {"learner": learner.run})

    def _make_learner(
        self,
        spec: SampleSpec,
        options: SupervisedConfig,
        algorithm: Supervised,
        store: SampleStore,
    ) -> Learner:
        """Build the learner and the steps after an update."""
        context = self.context

        def full_state() -> dict[str, Any]:
            return {
                "source": source_text(spec),
                "algorithm": algorithm.state_dict(),
                "progress": context.progress.state_dict(),
            }

        wanted = context.config.evaluation.best_metric
        ends = EndEpoch(options, algorithm, store, context)
        return context.make_learner(
            algorithm,
            store,
            full_state,
            lambda: [ends],
            best_metric=algorithm.metrics[0] if wanted == "return" else wanted,
            figures=ends.epoch_figures,
        )

    def _make_store(self, spec: SampleSpec, batch_size: int) -> SampleStore:
        """Return an empty store for this rank's samples, kept on the device or a window of them."""
        context, config = self.context, self.context.config
        # What is free, and left of learner.memory_limit_gib.
        free = min(free_bytes(context.device), int(room(context.device)))
        train, valid = (-(-count // context.group.size) for count in spec.sizes)
        most = replace(spec, sizes=(train, valid))
        choice = choose_cache(config.supply.cache, most, batch_size, free)
        store = SampleStore(
            spec,
            batch_size,
            config.run.seed,
            choice,
            context.device,
            context.metrics.copied,
            ordered=self._sync,
            group=context.group,
        )
        context.metrics.gauge("sample_cache", cache=choice.kind).set(1)
        logger.info(
            "source '%s': %s, %d classes; kept: %s (%s)",
            spec.name,
            store.split_text(),
            len(spec.classes),
            "on the device" if choice.kind == "device" else "a window, sent again each epoch",
            choice.reason,
        )
        return store

    def _count_undone(self) -> None:
        """Count what was trained after the checkpoint that the run continues from."""
        m, p = self.context.metrics, self.context.progress
        undone = m.total("rows_trained") - p.rows_trained - m.total("rows_undone")
        m.counter("rows_undone").inc(max(0, undone))

    def drain(self) -> None:
        """Wait for nothing: a resumed run requests outstanding samples again."""

    def end_input(self) -> None:
        """Close nothing: the learner's thread looks at `stop`."""
