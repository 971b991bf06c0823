"""Cost of certificates and tokens: the same training with and without, in turns.

`spread` at 32 environments a message, as in training_rate.py; learner and environment server are
real processes that speak TLS over loopback. A busy machine disturbs both alike; of several turns
the medians count. Tokens are compared once for each stream, so what is measured is the encryption.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import psutil

from murmur.benchmarks.effort import Effort
from murmur.benchmarks.training_rate import measure
from murmur.kit.certs import make_certificates

DESCRIPTION = (
    "training on spread at 32 environments a message with TLS and tokens, against plain text "
    "(target: at least 0.95 of the rate)"
)

ENVS, SESSIONS = 32, 2
_COMPARED = (
    "agent_steps_per_s",
    "agent_steps_per_cpu_s",
    "learner_cpu_us_per_env_step",
    "workers_cpu_us_per_env_step",
)


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure rates with and without, and their ratio."""
    turns, warm_up_s, seconds = effort.choose((1, 0.0, 0.2), (2, 2.0, 6.0), (5, 10.0, 20.0))
    measured: dict[str, list[dict[str, float]]] = {"plain text": [], "TLS and tokens": []}
    with tempfile.TemporaryDirectory(prefix="murmur-certs-") as name:
        folder = Path(name)
        make_certificates(folder, ["127.0.0.1"], days=1)
        for _ in range(turns):
            for kind, credentials in (("plain text", None), ("TLS and tokens", folder)):
                if effort is Effort.SMOKE and not credentials:
                    continue  # training_rate does the same
                measured[kind].append(measure(ENVS, SESSIONS, warm_up_s, seconds, credentials))
    result: dict[str, Any] = {
        kind: {key: statistics.median(turn[key] for turn in of) for key in of[0]}
        for kind, of in measured.items()
        if of
    }
    if effort is not Effort.SMOKE:
        plain, secured = result.values()
        result["ratio"] = {key: secured[key] / plain[key] for key in _COMPARED}
    result["load_average"] = psutil.getloadavg()[0]
    return result
