"""A run that learns from the samples of a source: one desk, one store, one learner."""

from dataclasses import replace
from typing import Any

from typing_extensions import override

from learner_service.algorithms.supervised import (
    Supervised,
    build_supervised,
    supervised_config,
)
from learner_service.checkpoint import load_algorithm, saved_source, source_text
from learner_service.runtime.memory import free_bytes, room
from learner_service.runtime.precision import Precision
from learner_service.serving.evaluation import check_best_metric
from learner_service.serving.supply import SupplyDesk
from learner_service.storage.samples import CacheChoice, SampleStore, choose_cache
from learner_service.tools.probe import supervised_update_seconds
from learner_service.training.chosen import resolve
from learner_service.training.epoch_duties import EpochDuties
from learner_service.training.process import RunProcess
from learner_service.training.share import share_of, with_precision
from learner_service.training.start_from import start_supervised
from shared.config.experiment import ExperimentConfig
from shared.config.text import config_text
from shared.errors import ConfigError, MurmurError, SpecError
from shared.process import end_process, logger
from shared.samples import SampleSpec


class SupervisedRun(RunProcess):
    """See the module. The desk's SupplyHost.

    Attributes:
        source: the data set, once the first session has named it.
        store: its samples, as far as they have come.
        supply: serves the sessions.
    """

    @override
    def _prepare(self) -> None:
        if self._serve_only:
            raise ConfigError(
                "a run with a source has no evaluation sessions to serve; `murmur evaluate` takes "
                "its checkpoints"
            )
        self.source: SampleSpec | None = None
        self.store: SampleStore | None = None
        self._choice: CacheChoice | None = None
        self.supply = SupplyDesk(self, self._config, self.metrics)

    @override
    def _open_saved(self, state: dict[str, Any]) -> None:
        self._open(saved_source(state))

    def open_source(self, spec: SampleSpec) -> None:
        """Begin the run with the data set of its first session. Called by the desk.

        Raises:
            SpecError: if the algorithm does not fit the samples.
        """
        self.gathering.join(source_text(spec))
        with self._opening():
            self._open(spec)

    def _open(self, spec: SampleSpec) -> None:
        """Build algorithm, store and learner for this data set, and start learning."""
        c = self._config
        if not spec.size("train"):
            raise SpecError(f"source '{spec.name}' has no samples in its split 'train'")
        options = supervised_config(share_of(c, self.group))
        how = self.group, spec, self._run_dir, self.device, supervised_update_seconds
        c = self._config = with_precision(c, *how)
        precision = Precision.of(c.learner, self.device, self.group)
        precision.warn_if_slow()
        algorithm = self._build_algorithm(spec, precision)
        check_best_metric(c.evaluation.best_metric, "the algorithm", algorithm.metrics)
        store = self._make_store(spec, options.batch_size)
        if self._checkpoint:
            path, state = self._checkpoint
            load_algorithm(path, state, c, algorithm)
            self.progress.load_state_dict(state["progress"])
            self._resumed_at = self.progress.updates
            self._folder.load_storage(path, state, store)
        self._count_undone()

        text = config_text(c)

        def full_state() -> dict[str, Any]:
            self._keep_folder()
            return {
                "source": source_text(spec),
                "config": text,
                "algorithm": algorithm.state_dict(),
                "progress": self.progress.state_dict(),
            }

        duties = EpochDuties(
            c,
            options,
            algorithm,
            store,
            self.progress,
            self._clock,
            full_state,
            self._stop,
            self.metrics.notices,
            self.group,
        )
        learner = self._make_learner(c, algorithm, store, duties, full_state, 1)
        if store.choice.kind == "stream":
            store.on_room = self.supply.wake
        self.source, self.store = spec, store
        self._note_device(f"source '{spec.name}'", precision.name)
        self._threads.append(self._thread("learner", learner.run))
        for thread in self._threads:
            thread.start()

    def _make_store(self, spec: SampleSpec, batch_size: int) -> SampleStore:
        """An empty store for this rank's samples, kept on the device or a window of them."""
        c = self._config
        self._choice = choice = choose_cache(
            c.supply.cache, self._share(spec), batch_size, self._free_bytes()
        )
        store = SampleStore(
            spec,
            batch_size,
            c.run.seed,
            choice,
            self.device,
            self.metrics.copied,
            ordered=self._sync,
            group=self.group,
        )
        self.metrics.gauge("sample_cache", cache=choice.kind).set(1)
        logger.info(
            "source '%s': %s, %d classes; kept: %s (%s)",
            spec.name,
            store.split_text(),
            len(spec.classes),
            "on the device" if choice.kind == "device" else "a window, sent again each epoch",
            choice.reason,
        )
        return store

    def _share(self, spec: SampleSpec) -> SampleSpec:
        """The samples that this rank keeps, at most."""
        train, valid = (-(-count // self.group.size) for count in spec.sizes)
        return replace(spec, sizes=(train, valid))

    def _build_algorithm(self, spec: SampleSpec, precision: Precision) -> Supervised:
        """The configured algorithm, with untrained networks."""
        c = self._config
        algorithm = build_supervised(share_of(c, self.group), spec, precision, self.device)
        if self._origin is not None:
            start_supervised(self._origin, c, spec, algorithm, self._run_dir)
        self._make_ready(algorithm)
        return algorithm

    def _free_bytes(self) -> int:
        """Memory that samples may take: what is free, and left of learner.memory_limit_gib."""
        return min(free_bytes(self.device), int(room(self.device)))

    def _count_undone(self) -> None:
        """Count what was trained after the checkpoint that the run continues from."""
        m = self.metrics
        undone = m.total("rows_trained") - self.progress.rows_trained - m.total("rows_undone")
        m.counter("rows_undone").inc(max(0, undone))

    def admit_supply(self) -> None:
        """A session is admitted: the run begins.

        Raises:
            ResourceError: if the configuration cannot be written.
        """
        if not self.begun:
            self.keep_config()
            self.begun = True

    def fail(self, error: MurmurError) -> None:
        """See SupplyHost."""
        logger.error("%s", error)
        end_process(2)

    def _completed(self) -> ExperimentConfig:
        """See RunProcess: with all options of the algorithm, and in async what was chosen."""
        c = self._config
        if self._choice is not None and not self._sync:
            c = c.changed({"supply.cache": self._choice.kind})
        return resolve(c, self.source)

    def drain(self) -> None:
        """See RunProcess: a resumed run requests outstanding samples again."""

    def _end_input(self) -> None:
        """See RunProcess: the learner's thread looks at `stop`."""
