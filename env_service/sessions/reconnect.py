"""Reconnection to a learner: the end of a stream, the pauses, and giving up."""

import contextlib
import logging
import random
import time
from collections.abc import Iterator

import grpc
import numpy as np

from murmur.env_service.metrics import WorkerMetrics
from murmur.shared.config.experiment import EnvServerConfig
from murmur.shared.process.errors import ConnectionLostError, MurmurError, RunCompleteError
from murmur.shared.process.process import Backoff
from murmur.shared.wire.channel import FINAL, RUN_COMPLETE, proxy_in_use

logger = logging.getLogger("murmur")

_REMIND_EVERY_S = 30.0  # between two lines that say what the worker waits for

# A part of gRPC's text about a failed connection -> its cause and fix; the first one counts.
_ADVICE = {
    "certificate has expired": "the learner's certificate has ended: renew it there with "
    "`murmur certs --renew`",
    "CERTIFICATE_VERIFY_FAILED": "the learner's certificate is of another authority than "
    "security.folder's ca.pem",
    "WRONG_VERSION_NUMBER": "the learner speaks plain text, security.folder is set here",
    "Socket closed": "the learner wants a certificate that it knows: see security.folder; one that "
    "has ended must be renewed",
    "Connection refused": "no process listens there: start it, or set env_server.learner",
}


class Disconnected(Exception):  # noqa: N818 - an event; reconnecting handles it
    """The end of a stream, with its gRPC status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        """Keep the status."""
        super().__init__(f"{code.name}: {details}")
        self.code, self.details = code, details


class ReconnectPolicy:
    """The pauses before reconnecting, and the time of giving up, for a worker's sessions."""

    def __init__(self, config: EnvServerConfig, metrics: WorkerMetrics) -> None:
        """Start the time without a learner."""
        self._config, self._metrics = config, metrics
        self._since = time.monotonic()  # no session has had a learner
        self._reminded = -np.inf
        self._met = self._complete = False  # a learner; its run, as it said when it left

    def backoff(self) -> Backoff:
        """Make the pauses between attempts to reach one learner."""
        return Backoff(self._config.reconnect_min_s, self._config.reconnect_max_s, random.random)

    @contextlib.contextmanager
    def session(self, learner: str, backoff: Backoff) -> Iterator[None]:
        """Count a session as playing during the block, and reset the pauses."""
        self._metrics.sessions += 1
        backoff.reset()
        self._since = time.monotonic()
        if self._reminded > 0 or not self._met:
            logger.info("connected to learner at %s", learner)
        self._met, self._complete = True, False
        self._reminded = -np.inf
        try:
            yield
        finally:
            self._metrics.sessions -= 1
            backoff.reset()
            self._since = time.monotonic()

    def pause_s(self, learner: str, backoff: Backoff, error: Disconnected) -> float:
        """Return the pause before reconnecting to a learner, s.

        Raises:
            MurmurError: if reconnecting cannot help.
            ConnectionLostError: if no session has had a learner for give_up_after_s;
                RunCompleteError if the run of the last one is complete.
        """
        self._metrics.counts["reconnects"] += 1
        if error.code in FINAL:
            raise MurmurError(f"learner at {learner} refused the session: {error.details}")
        if advice := _handshake_advice(learner, error.details):
            error = Disconnected(error.code, f"{advice}; {error.details}")
        now = time.monotonic()
        waited, patience = now - self._since, self._config.give_up_after_s
        self._complete |= error.details == RUN_COMPLETE
        if waited > patience and not self._metrics.sessions:
            if self._complete:
                raise RunCompleteError(
                    f"the run of the learner at {learner} is complete, and no other learner came "
                    f"within {waited:.0f} s (env_server.give_up_after_s)"
                )
            raise ConnectionLostError(
                f"no learner at {learner} for {waited:.0f} s (give_up_after_s); last: {error}"
            )
        if now - self._reminded > _REMIND_EVERY_S:
            if self._complete:
                logger.info(
                    "the run of the learner at %s is complete; this server ends unless another "
                    "learner comes within %.0f s (env_server.give_up_after_s)",
                    learner,
                    max(0.0, patience - waited),
                )
            else:
                logger.info("waiting for learner at %s (%s)", learner, error)
            self._reminded = now
        return backoff.pause_s()


def _handshake_advice(learner: str, details: str) -> str:
    """Return advice about a failed connection; empty if its cause is not known.

    gRPC has one status for all causes, so its text must tell; docs/security.md has the table.
    """
    if "failed to connect" not in details:  # but of a stream that was cut
        return ""
    if proxy := proxy_in_use(learner):
        host = learner.rpartition(":")[0]
        return f"the connection goes through the proxy of {proxy}: set no_proxy={host} to avoid it"
    return next((advice for sign, advice in _ADVICE.items() if sign in details), "")
