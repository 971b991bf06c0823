"""What a learner's counters were at two moments: from its metrics port, Prometheus or its log."""

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from murmur.run_folder import RunFolder
from shared.errors import ConfigError

_PREFIX = "murmur_learner_"


@dataclass(frozen=True)
class Snapshot:
    """Counters of a learner at one moment.

    Attributes:
        time: seconds.
        rows: environment rows received.
        updates: updates made.
        device_busy: seconds in which the device worked.
        threads: seconds by thread and state.
        agents: agents of the environment; 0 if unknown.
        sessions: connected training sessions; 0 if unknown.
        machine_busy: share of the learner's machine's processors in use, 0 to 1; None: unknown.
        environments: that are connected for training; 0 if unknown.
        environments_limit: how many may act at once; 0: any number.
    """

    time: float
    rows: float
    updates: float
    device_busy: float
    threads: Mapping[str, Mapping[str, float]]
    agents: int = 0
    sessions: int = 0
    machine_busy: float | None = None
    environments: int = 0
    environments_limit: int = 0


def from_run(run: RunFolder, window_s: float) -> tuple[Snapshot, Snapshot]:
    """The last seconds of a run, from its progress file.

    Raises:
        ConfigError: if the run has logged too little.
    """
    records = [r for r in run.records("progress") if "ledger" in r]
    if not records:
        raise ConfigError(f"'{run.path}' has logged no progress yet; try again in a few seconds")
    last = records[-1]
    # The ledger begins anew with each process: go back no further than this one's start.
    earlier = [
        r
        for r in records
        if last["time"] - window_s <= r["time"] < last["time"]
        and all(
            sum(r["ledger"].get(thread, {}).values()) <= sum(states.values())
            for thread, states in last["ledger"].items()
        )
    ]
    if not earlier:
        raise ConfigError(f"'{run.path}' has logged too little; try again in a few seconds")
    return _from_record(earlier[0]), _from_record(last)


def _from_record(record: Mapping[str, Any]) -> Snapshot:
    steps = record["env_steps"]
    return Snapshot(
        record["time"],
        record["rows_received"],
        record["updates"],
        record["device_busy_s"],
        record["ledger"],
        round(record["agent_steps"] / steps) if steps else 0,
        machine_busy=record["machine_busy"],
        environments_limit=record["environments_limit"],
    )


def from_metrics(url: str, window_s: float) -> tuple[Snapshot, Snapshot]:
    """Two looks at a learner's metrics endpoint, `window_s` seconds apart.

    Raises:
        ConfigError: if it cannot be read.
    """
    first = _scrape(url)
    time.sleep(window_s)
    return first, _scrape(url)


def _scrape(url: str) -> Snapshot:
    address = url.rstrip("/")
    if not address.endswith("/metrics"):
        address += "/metrics"
    text = _get(address, "a learner's metrics port is learner.metrics_port, 9101 by default")
    samples = [
        (s.name, s.labels, s.value)
        for family in text_string_to_metric_families(text)
        for s in family.samples
    ]
    return _snapshot(time.time(), samples, address)


def from_prometheus(url: str, window_s: float) -> tuple[Snapshot, Snapshot]:
    """What Prometheus stored of a learner now and `window_s` seconds ago.

    Raises:
        ConfigError: if it cannot be reached, or knows no learner, or more than one.
    """
    now = time.time()
    snapshots = []
    for at in (now - window_s, now):
        query = urllib.parse.urlencode(
            {"query": '{__name__=~"murmur_learner_.+"}', "time": f"{at:.3f}"}
        )
        address = f"{url.rstrip('/')}/api/v1/query?{query}"
        answer = json.loads(_get(address, "give Prometheus's address, like http://host:9090"))
        result = answer["data"]["result"]
        instances = {r["metric"].get("instance", "") for r in result}
        if len(instances) != 1:
            raise ConfigError(
                f"Prometheus at {url} knows {len(instances)} learners at that time "
                f"{sorted(instances)}; give one learner's metrics address instead"
            )
        samples = [(r["metric"]["__name__"], r["metric"], float(r["value"][1])) for r in result]
        snapshots.append(_snapshot(at, samples, url))
    return snapshots[0], snapshots[1]


def _get(address: str, hint: str) -> str:
    try:
        # S310: the address is the user's own, from the command line.
        with urllib.request.urlopen(address, timeout=10) as response:  # noqa: S310
            text: str = response.read().decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"cannot read {address.split('?')[0]}: {reason}; {hint}") from None
    return text


def _snapshot(
    at: float, samples: Sequence[tuple[str, Mapping[str, str], float]], where: str
) -> Snapshot:
    single: dict[str, float] = {}
    threads: dict[str, dict[str, float]] = {}
    for name, labels, value in samples:
        short = name.removeprefix(_PREFIX)
        if short == "state_seconds_total":
            threads.setdefault(labels["thread"], {})[labels["state"]] = value
        elif short == "sessions" and labels.get("mode") != "train":
            continue
        else:
            single[short] = value
    if "rows_received_total" not in single or "inference" not in threads:
        raise ConfigError(f"{where} serves no metrics of a learner that has begun its run")
    steps = single.get("env_steps_total", 0)
    return Snapshot(
        at,
        single["rows_received_total"],
        single.get("updates_total", 0.0),
        single.get("device_busy_seconds_total", 0.0),
        threads,
        round(single.get("agent_steps_total", 0) / steps) if steps else 0,
        int(single.get("sessions", 0)),
        single.get("machine_busy_ratio"),
        int(single.get("environments", 0)),
        int(single.get("environments_limit", 0)),
    )
