"""Method optuna: each run is a trial of an Optuna study that is kept in the sweep's folder."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from murmur.runs.scores import Metric
from murmur.sweeps.folder import SweepFolder, SweepRun, run_name, short_value
from murmur.sweeps.search import example
from murmur.sweeps.spec import Distribution, experiment
from shared.config.text import one_line
from shared.process.errors import ConfigError

if TYPE_CHECKING:
    import optuna

STORAGE = "optuna.log"


class Searched:
    """Runs that Optuna proposes one by one: the queue of a scheduler. Used by one thread.

    Attributes:
        study: study of Optuna, kept in the sweep's folder.
    """

    def __init__(self, sweep: SweepFolder) -> None:
        """Open the study, or make it.

        Trials of runs that had begun continue; trials that were proposed and never written into
        the index count as failed.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep, self._states = sweep, optuna.trial.TrialState
        self._metric = Metric.parse(example(sweep.spec).evaluation.best_metric)
        self.study = _open_study(sweep, self._metric)
        known = {run.trial: run for run in sweep.runs}
        for trial in self.study.get_trials(deepcopy=False):
            if not trial.state.is_finished() and trial.number not in known:
                self.study.tell(trial.number, state=self._states.FAIL)
        self._trials: dict[str, optuna.Trial] = {}  # of this process, by run: these can be pruned
        self._again = [run for run in sweep.runs if run.state not in ("complete", "pruned")]

    def next(self) -> SweepRun | None:
        """Return the next run: one that had begun, else a new trial; None if all are proposed."""
        if self._again:
            return self._again.pop(0)
        spec = self._sweep.spec
        while len(self._sweep.runs) < spec.trials:
            trial = self.study.ask()
            settings = {key: _suggest(trial, key, values) for key, values in spec.vary.items()}
            words = [f"{trial.number:03d}", *map(short_value, settings.values())]
            name = run_name(words, spec.seeds[0])
            settings["run.seed"] = spec.seeds[0]
            run = SweepRun(name, spec.configs[0], settings, trial=trial.number)
            try:
                self._sweep.add(run, experiment(spec, run.config, run.settings, name))
            except ConfigError as error:  # these settings do not fit together: Optuna learns that
                run.state, run.message = "failed", str(error)
                self._sweep.runs.append(run)
                self.ended(run)
                continue
            self._trials[name] = trial
            return run
        return None

    def evaluated(self, run: SweepRun, record: Mapping[str, Any]) -> bool:
        """Report an evaluation; return whether the study's pruner gives the run up."""
        found = record.get("metrics", {}).get(self._metric.name)
        trial = self._trials.get(run.name)
        if found is None or trial is None or not self._sweep.spec.prune:
            return False
        trial.report(found["mean"], int(record["updates"]))
        return bool(trial.should_prune())

    def ended(self, run: SweepRun) -> None:
        """Report a run's last evaluation to the study."""
        assert run.trial is not None
        value, state = None, self._states.FAIL
        if run.state == "complete" and run.last is not None:
            value, state = run.last, self._states.COMPLETE
        elif run.state == "pruned":
            state = self._states.PRUNED
        # A run that failed, and was repeated, is not reported again.
        self.study.tell(run.trial, value, state, skip_if_finished=True)


def _open_study(sweep: SweepFolder, metric: Metric) -> "optuna.Study":
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    # With a relative path Optuna would wait forever for the lock of a process that was killed; this
    # process has locked the sweep, so any lock of the file is left over.
    file = sweep.path.resolve() / STORAGE
    file.with_name(f"{STORAGE}.lock").unlink(missing_ok=True)
    storage = JournalStorage(JournalFileBackend(str(file)))
    # A resumed search must not draw again what it drew at first.
    seed = sweep.spec.search_seed + len(sweep.runs)
    return optuna.create_study(
        storage=storage,
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner() if sweep.spec.prune else optuna.pruners.NopPruner(),
        study_name="sweep",
        direction="minimize" if metric.less_is_better else "maximize",
        load_if_exists=True,
    )


def _suggest(trial: "optuna.Trial", key: str, values: Distribution) -> Any:  # noqa: ANN401
    """Return the value of one key that the sampler proposes."""
    if values.kind == "integers":
        return trial.suggest_int(key, int(values.low), int(values.high))
    if values.kind in ("uniform", "log_uniform"):
        log = values.kind == "log_uniform"
        return trial.suggest_float(key, values.low, values.high, log=log)
    words = [one_line(value) for value in values.values]  # Optuna's choices are plain values
    return values.values[words.index(trial.suggest_categorical(key, words))]
