"""Content of the live page, read from the run's folder as it grows."""

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any

from typing_extensions import override

from murmur.doctor.device_report import busy_share, gpu_figures
from murmur.live_page.alerts import (
    SEVERITIES,
    Alert,
    LogWatch,
    Movement,
    alerts_of_progress,
    doctors_finding,
    learning_alert,
)
from murmur.live_page.curves import CurveReader, OtherRuns
from murmur.live_page.episode import EpisodePictures, Sheet
from murmur.live_page.ledger_states import STATES
from murmur.runs.readings import loss_reading
from murmur.runs.run_folder import RunFolder
from murmur.runs.scores import Metric, Pace, completion, state_of
from murmur.shared.config.text import plain_data, to_yaml, without_secrets
from murmur.text import duration, short_number

REPORT = "report.html"  # where `murmur report` writes by default
MOST_LOG = 1 << 20  # bytes of a log that the page shows, the newest
READ_S = 0.25  # the longest that one answer reads for; a long run's page loads in several
LOOK_S = 0.5  # between two looks at the files, however many pages are open
_EXAMINE_S = 15.0  # between two findings of the doctor
_LATELY_S = 15.0  # a run whose progress is so new is under way, on whatever machine


class _RunReader(CurveReader):
    """Reader of what the page shows of its own run.

    Attributes, beside those of a CurveReader:
        last: newest record of progress; empty if there is none.
        busy: share of time that the device worked lately; None: unknown.
        moved: times at which counters grew.
        logs: warnings and errors in the logs.
    """

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run.progress_file)
        self.last: dict[str, Any] = {}
        self.busy: float | None = None
        self.moved = Movement()
        self.logs = LogWatch(run)

    @override
    def steps(self) -> Iterator[None]:
        yield from super().steps()
        yield from self.logs.read()

    @override
    def take(self, record: Mapping[str, Any]) -> None:
        super().take(record)
        if record.get("kind") == "progress":
            self.moved.add(record)
            self.busy = busy_share([self.last, record])
            self.last = dict(record)


class RunView:
    """A run as the page shows it. `state` may be called by any thread.

    Reads only what was added since the last call, and nothing between calls.
    """

    def __init__(self, run: RunFolder) -> None:
        """Show `run`; nothing is read yet."""
        self._run, self._lock = run, Lock()
        self._configured = 0
        self._episode = EpisodePictures(run)
        self.others = OtherRuns(run)
        self._begin()

    def _configure(self) -> None:
        """Read the configuration, again if it was written again, as a resumed run's is.

        Raises:
            ConfigError: if it cannot be read.
        """
        written = self._configured
        with contextlib.suppress(OSError):  # it was deleted
            written = (self._run.path / "config.yaml").stat().st_mtime_ns
        if written != self._configured or not written:
            self._configured, self._config = written, self._run.config()
            self._metric = Metric.parse(self._config.evaluation.best_metric)
            self._pace = Pace(self._config.run)

    def _begin(self) -> None:
        self._reader = _RunReader(self._run)
        self._looked = self._examined = float("-inf")
        self._finding: Alert | None = None

    def state(self, cursor: str = "") -> dict[str, Any]:
        """Return the page's state as JSON values; of curves the points after this cursor."""
        with self._lock:
            behind = self._read()
            state = self._state()
            last = self._reader.last
            share = completion(self._config.run, last) if last else None
            return {
                "name": self._config.run.name,
                "about": self._about(),
                "state": state,
                "words": self._text(state, share),
                "share": share,
                "figures": _figures(last)
                | gpu_figures(last.get("device") or {}, self._reader.busy),
                "metric": self._metric.name,
                "supervised": self._config.supervised,
                "curves": self._reader.curves.since(cursor),
                "states": STATES,
                "readings": {n: loss_reading(n) for n in last.get("losses") or {}},
                "files": self._files(),
                "others": self.others.names(),
                "alerts": [vars(alert) for alert in self._alerts(state)],
                "episode": self._episode.state(self._config),
                "behind": behind,
                "live": state in ("running", "starting"),
            }

    def _read(self) -> bool:
        """Read new records; return whether there are more."""
        now = time.monotonic()
        if not self._reader.behind and now - self._looked < LOOK_S:
            return False
        self._configure()
        self._looked = now
        if self._reader.replaced():  # by a restart in the same folder
            self._begin()
        return self._reader.read(READ_S)

    def _state(self) -> str:
        """Return the state: starting, running, complete, stopped, or begun without a checkpoint."""
        state = state_of(self._run, self._config, self._reader.last)
        lately = abs(time.time() - self._reader.last.get("time", 0.0))  # its clock may be ahead
        pause = 3 * self._config.learner.log_every_s
        if state in ("stopped", "begun") and lately < max(_LATELY_S, pause):
            return "running"  # by processes of another machine
        return "starting" if state == "running" and not self._reader.last else state

    def _text(self, state: str, share: float | None) -> str:
        if state == "starting":
            return "starting: no update yet"
        if state == "running":
            if share is None:
                return "running; no end is set"
            self._pace.note(self._reader.last)
            left = self._pace.left_s()
            ends = "" if left is None else f", {duration(left)} left"
            return f"running, {100 * share:.0f} % done{ends}"
        if state == "complete":
            return f"complete after {duration(self._reader.last.get('seconds') or 0.0)}"
        kept = "it can be resumed" if state == "stopped" else "it has no checkpoint"
        return f"not running; {kept}: `{self._run.again()}`"

    def _about(self) -> dict[str, str]:
        """Return facts about the run by name, such as environment, seed and device."""
        config, start = self._config, self._run.read_json("command.json")
        machine, device = start.get("machine") or {}, start.get("device") or {}
        plugin = config.source if config.supervised else config.environment
        processor = machine.get("cpu") and f"{machine['cpu']}, {machine.get('cores')} cores"
        about = {
            "environment": plugin.options.get("factory", plugin.name),
            "algorithm": config.algorithm.name,
            "network": config.network.name,
            "seed": str(config.run.seed),
            "started": str(start.get("started", ""))[:16].replace("T", " "),
            "processor": processor,
            "learns on": device.get("name") if device.get("type") != "cpu" else "processor",
            "command": without_secrets(start.get("command")),
            "folder": str(self._run.path),
        }
        if config.supervised:
            about["source"] = about.pop("environment")
        return {name: str(text) for name, text in about.items() if text}

    def configuration(self) -> str:
        """Return the run's configuration as YAML, without passwords and keys."""
        with self._lock:
            self._configure()
            return to_yaml(without_secrets(plain_data(self._config)))

    def sheet(self, *, newest: bool) -> Sheet | None:
        """Draw the newest episode; see EpisodePictures.sheet."""
        with self._lock:
            self._configure()
            name = self._config.environment.name
        return self._episode.sheet(name, newest=newest)

    def report(self) -> bytes | None:
        """Return the page that `murmur report` wrote; None if there is none."""
        try:
            return (self._run.path / REPORT).read_bytes()
        except OSError:
            return None

    def log(self, name: str) -> str | None:
        """Return the end of a log, at most MOST_LOG bytes; None if there is no log of this name."""
        logs = {log.name: log for log in self._run.logs.glob("*.log")}
        if name not in logs:
            return None
        with logs[name].open("rb") as file:
            left_out = max(0, file.seek(0, os.SEEK_END) - MOST_LOG)
            file.seek(left_out)
            text = file.read(MOST_LOG).decode(errors="replace")
        if not left_out:
            return text
        return f"(the first {left_out:,} bytes are left out: {logs[name]})\n{text}"

    def _files(self) -> dict[str, Any]:
        """Return which files of the run the page can show."""
        return {
            "report": (self._run.path / REPORT).is_file(),
            "report_command": f"murmur report {shlex.quote(str(self._run.path))}",
            "logs": sorted(log.name for log in self._run.logs.glob("*.log")),
        }

    def _alerts(self, state: str) -> list[Alert]:
        """Return the alerts, the most severe first."""
        running = state == "running"
        up_to_date = not self._reader.behind  # else the newest record is still to be read
        found = [*self._reader.logs.alerts(), *learning_alert(self._run)]
        found += alerts_of_progress(
            self._reader.last, self._reader.moved, self._config, running=running and up_to_date
        )
        if time.monotonic() - self._examined > _EXAMINE_S and up_to_date:
            self._examined = time.monotonic()
            self._finding = doctors_finding(self._run, self._config) if running else None
        found += [self._finding] if self._finding and running else []
        return sorted(found, key=lambda alert: SEVERITIES.index(alert.severity))


def _figures(last: Mapping[str, Any]) -> dict[str, str]:
    """Return the newest figures, by name."""
    if not last:
        return {}
    figures = {
        "training time": duration(last.get("seconds") or 0.0),
        "updates": short_number(last.get("updates")),
    }
    if samples := last.get("samples"):
        return figures | {
            "epoch": f"{samples['epoch']} of {samples['epochs']}",
            "samples/s": short_number(last.get("agent_steps_per_s")),
            "loss": short_number((last.get("losses") or {}).get("loss")),
        }
    return figures | {
        "environment steps": short_number(last.get("env_steps")),
        "agent-steps/s": short_number(last.get("agent_steps_per_s")),
        "episodes": short_number(last.get("episodes")),
        "policy lag": short_number(last.get("policy_lag")),
        "return": short_number(last.get("return")),
        **{f"curriculum: {name}": _place(at) for name, at in last.get("curriculum", {}).items()},
    }


def _place(course: Mapping[str, Any]) -> str:
    """Return where an option of a curriculum stands."""
    value = course["value"]
    text = value if isinstance(value, str) else short_number(float(value))
    if "level" not in course:
        return text
    return f"{text} (level {course['level'] + 1} of {len(course['episodes'])})"
