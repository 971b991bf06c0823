"""Training on this machine: one learner and its environment servers as child processes.

    murmur train ── learner          exit 0: the run is complete; several: murmur.runs.ranks
                 ├─ env-server       restarted until the learner ends
                 └─ evaluator        the same, for greedy evaluation

A child that dies is started again with growing pauses; the learner continues from its last
checkpoint, at the port it had if that is free still. A child that exits with 2 hit an error that
only the user can fix: its own message is shown and everything stops. So it does when a child fails
twice with the same message before the run made progress. Children die with the supervisor.
"""

import re
import shlex
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from murmur.runs.child import Child, ChildError, murmur_command
from murmur.runs.log_errors import TROUBLE
from murmur.runs.run_folder import EPISODE, LineTail, RunFolder
from murmur.runs.servers import ServerRecorder
from murmur.runs.settings import setting
from murmur.shared.process.addresses import host_and_port, own_client_host
from murmur.shared.process.errors import ResourceError
from murmur.shared.wire.notices import FILE as NOTICES
from murmur.shared.wire.notices import PREFIX

TICK_S = 0.25
HOLD_S = 5.0  # at the start: how long a trouble is kept back, as it may be the error that ends all
# What a log tells that belongs on the screen: another port than the usual one, and datasets.
_SHOWN = re.compile(
    r'(?:listening|metrics) .*port \d+ is in use\)|(?:replay: begins with|cloning) [^"]*'
)
_SAME = 80  # characters by which an error and a log's line are the same
STOP_LEARNER_S = 60.0  # its final checkpoint
STOP_OTHERS_S = 15.0
START_LIMIT_S = 1800.0  # seconds are usual; minutes on a machine whose processors others use
SAY_EVERY_S = 30.0


class LearnerEndedError(ResourceError):
    """Orderly end of a learner before it listened."""


class StopRequested(Exception):  # noqa: N818 - an event
    """Stop of a run by the supervisor's stop event."""


class Supervisor:
    """Supervisor of the processes of one training run. All methods are called from one thread.

    Attributes:
        stop_failure: reason why the learner did not end in order when it was told to; "" if it did.
        progressed: True once the run has recorded progress.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        resume: bool,
        host: str,
        servers: Sequence[str],
        draws_itself: bool = False,
        say: Callable[[str], None],
        on_progress: Callable[[dict[str, Any]], None],
        on_trouble: Callable[[Path, str], None],
        learners: int = 1,
        stop: threading.Event | None = None,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            run: run's folder for all output; its config_file must be there.
            resume: True if the learner continues from its last checkpoint. It writes config.yaml
                once that has turned out to fit.
            host: address that the learner listens on.
            servers: names of the processes that step environments: "env-server", "evaluator".
            draws_itself: True if the environment draws itself, so that no episode is recorded: it
                would slow evaluations down.
            say: function called with lines about events of the processes.
            on_progress: function called with each new record of progress.jsonl.
            on_trouble: function called with each new warning or error of a log: the log and the
                line.
            learners: number of learners that learn together.
            stop: event that ends the run in order when it is set, by any thread; None: only Ctrl-C
                does.
        """
        self._stopping = stop or threading.Event()
        self._run = run
        self._host, self._draws_itself = own_client_host(host), draws_itself
        self._resume = resume
        self._config_file = str(run.config_file(resume=resume))
        self._say = say
        self._on_progress = on_progress
        self._on_trouble = on_trouble
        self._tail = LineTail(run.progress_file, skip=resume)
        self._notices = LineTail(run.path / NOTICES, skip=resume)  # others were said before
        self._noticed = set[str]()
        self._servers = ServerRecorder(run)
        self._learners = learners
        self.stop_failure = ""
        self.progressed = False
        self._held: list[tuple[float, Path, str]] = []  # troubles, and when to say them
        self._ports: list[int] = []  # of the learners, by rank
        further = range(1, learners)
        self._ports_files = ["learner.json", *(f"learner-{rank}.json" for rank in further)]
        self._tells_start = not resume
        self.learner = self._child("learner", self._learner_command)
        self.learner.lock = run.lock
        self.others = [
            self._child(name, partial(self._env_server_command, evaluate=name == "evaluator"))
            for name in servers
        ]
        logs = [child.log for child in [self.learner, *self.others]]
        self._logs = {log: LineTail(log, skip=True) for log in logs}

    @property
    def deaths(self) -> int:
        """Number of times that a child ended without a request."""
        return sum(child.deaths for child in [self.learner, *self.others])

    def run(self) -> None:
        """Train until the learner says that the run is complete.

        Raises:
            KeyboardInterrupt: after a graceful stop.
            StopRequested: the same, if `stop` was set.
            ChildError: if a child hit an error that the user can fix.
            ResourceError: if a child keeps dying or never starts, or the run's folder was moved.
        """
        final = ""
        try:
            if not self._start_learner():
                return
            while True:
                code = self.learner.tend(self._say)
                self._report()
                if code == 0:
                    return
                for child in self.others:
                    child.tend(self._say)
                if moved := self._run.lock.moved_to():
                    raise ResourceError(
                        f"run folder {self._run.path} was moved to {moved} while the run trains; "
                        "it is stopped. Continue with: murmur train --resume --run "
                        f"{shlex.quote(str(moved))}"
                    )
                self._servers.record()
                if self._stopping.wait(TICK_S):
                    raise StopRequested
        except ChildError as error:
            final = str(error)
            raise
        except (KeyboardInterrupt, StopRequested):
            self._say("stopping: the learner, if it has begun, writes a checkpoint first …")
            raise
        finally:
            self.stop()
            self._report()
            self._tell_held(final=final)

    def stop(self) -> None:
        """End all children, the learner first: to its final checkpoint it may need more rows."""
        try:
            self.learner.signal(signal.SIGTERM)
            self.stop_failure = self.learner.wait(STOP_LEARNER_S)
            for child in self.others:
                child.signal(signal.SIGTERM)
            for child in self.others:
                child.wait(STOP_OTHERS_S)
        finally:  # interrupted by a second Ctrl-C: leave no process behind
            for child in [self.learner, *self.others]:
                child.kill()

    def _start_learner(self) -> bool:
        """Start the learner and wait until it listens: the others need its port.

        Returns:
            success; False if the learner ended in order instead: its run had been complete before.
        """
        for file in self._run.path.glob("learner*.json"):
            file.unlink()
        self.learner.start()
        try:
            self._ports = [
                wait_for_port(self._run, self.learner, self._say, file, stop=self._stopping)
                for file in self._ports_files
            ]
        except LearnerEndedError:
            if not self._resume:
                raise
            last = list(self._logs[self.learner.log])[-1:]
            self._say("".join(last).partition("WARNING ")[2] or "the run is complete")
            return False
        return True

    def _follow_learner(self) -> None:
        """Start the others again if a restarted learner had to take another port."""
        ports = [int(self._run.read_json(file).get("port", 0)) for file in self._ports_files]
        if all(ports) and ports != self._ports:
            self._ports = ports
            for child in self.others:
                child.restart()

    def _report(self) -> None:
        if self._tells_start and (lines := self._run.read_json("started_from.json").get("words")):
            self._tells_start = False
            for line in lines:
                self._say(line)
        for record in self._tail.records():
            self.progressed = True
            for child in [self.learner, *self.others]:
                child.settled = True
            self._on_progress(record)
        for notice in self._notices.records():
            text = str(notice.get("text"))
            if text not in self._noticed:  # several learners may say it
                self._noticed.add(text)
                self._say(f"! {text}")
        for log, lines in self._logs.items():
            for line in lines:
                if PREFIX in line:
                    continue
                self._servers.read_log(log, line)
                if shown := _SHOWN.search(line):
                    self._say(f"{log.stem}: {shown[0]}")
                    if log == self.learner.log and self._ports:
                        self._follow_learner()
                if TROUBLE.match(line):
                    self._held.append((time.monotonic() + HOLD_S, log, line))
        self._tell_held()

    def _tell_held(self, final: str | None = None) -> None:
        """Tell the troubles that are due: once there is progress, at once.

        Args:
            final: at the end: the error that ends the run, which is not told twice; "": none.
        """
        now, held = time.monotonic(), self._held
        all_due = self.progressed or final is not None
        self._held = [] if all_due else [trouble for trouble in held if trouble[0] > now]
        for due, log, line in held:
            if (all_due or due <= now) and not (final and final[:_SAME] in line):
                self._on_trouble(log, line)

    def _child(self, name: str, command: Callable[[Child], list[str]]) -> Child:
        return Child(name, command, self._run.logs / f"{name}.log")

    def _learner_command(self, child: Child) -> list[str]:
        again = "--resume" if self._run.has_checkpoint() else "--auto-resume"
        arguments = [
            self._config_file,
            "--run",
            str(self._run.path),
            *(["--resume"] if self._resume else [again] if child.deaths else []),
        ]
        return murmur_command("learner", *arguments, "--learners", str(self._learners))

    def _env_server_command(self, _: Child, evaluate: bool) -> list[str]:
        ports = self._ports[:1] if evaluate else self._ports  # rank 0 evaluates
        learners = ",".join(host_and_port(self._host, port) for port in ports)
        # JSON: YAML would take the bracket of an IPv6 address for a list.
        settings = [setting("env_server.learner", learners)]
        if evaluate:
            settings.append("env_server.metrics_port=0")  # the other server has that of the file
        if evaluate and not self._draws_itself:
            file = str((self._run.path / EPISODE).resolve())
            settings.append(setting("evaluation.episode_file", file))
        return murmur_command(
            "env-server",
            self._config_file,
            *(["--evaluate"] if evaluate else []),
            *(part for item in settings for part in ("--set", item)),
        )


def wait_for_port(
    run: RunFolder,
    learner: Child,
    say: Callable[[str], None],
    file: str = "learner.json",
    *,
    stop: threading.Event | None = None,
) -> int:
    """Wait for the port of a new learner, which writes it to `file` once it listens.

    Args:
        run: the run's folder.
        learner: process of the learner.
        say: function called with lines about it, now and then.
        file: file of this learner.
        stop: event that ends the wait when it is set.

    Raises:
        StopRequested: if `stop` is set.
        ChildError: if it exits with 2 before it listens.
        LearnerEndedError: if it exits with 0 before it listens.
        ResourceError: if it keeps dying, or does not listen within START_LIMIT_S.
    """
    stop = stop or threading.Event()
    began = said = time.monotonic()
    while True:
        if learner.tend(say) == 0:
            raise LearnerEndedError(f"the learner ended before it listened; see {learner.log}")
        info = run.read_json(file)
        if info.get("port"):
            return int(info["port"])
        now = time.monotonic()
        if now - began > START_LIMIT_S:
            raise ResourceError(
                f"the {learner.name} did not listen within {START_LIMIT_S:.0f} s; see {learner.log}"
            )
        if now - said >= SAY_EVERY_S:
            said = now
            say(f"the {learner.name} does not listen yet after {now - began:.0f} s; Ctrl-C stops")
        if stop.wait(0.1):
            raise StopRequested
