"""Counters of a learner at two moments: from its metrics port, Prometheus or its log."""

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from murmur.doctor.latency import Buckets
from murmur.runs.drops import rollout_message
from murmur.runs.run_folder import RunFolder
from murmur.shared.process.addresses import host_and_port, is_loopback, own_client_host
from murmur.shared.process.errors import ConfigError

_PREFIX = "murmur_learner_"
WINDOW_S = 30.0  # looked at, where nothing else is asked for: longer if updates take longer
MOST_S = 3600.0
LOOK_S = 300.0  # the longest that a live learner is watched without a request
# Metrics of the device -> their names in progress.jsonl; labels are summed over.
_DEVICE_FIGURES = {
    "device_memory_bytes": "memory_bytes",
    "graph_replays_total": "graph_replays",
    "eager_calls_total": "eager_calls",
    "graph_fallbacks_total": "graph_fallbacks",
    "graph_captures_total": "graph_captures",
    "graph_capture_seconds_total": "graph_capture_seconds",
    "eager_seconds_total": "eager_seconds",
    "acts_waited_total": "acts_waited",
    "acts_waited_seconds_total": "acts_waited_seconds",
}
UPDATES = 4  # an update's phases are seen in their proportions only over several


@dataclass(frozen=True)
class Snapshot:
    """Counters of a learner at one moment.

    Attributes:
        time: time of the snapshot [s].
        rows: environment rows received.
        updates: updates made.
        device_busy: seconds in which the device worked.
        threads: seconds by thread and state.
        agents: agents of the environment; 0 if unknown.
        sessions: connected training sessions; 0 if unknown.
        machine_busy: share of the learner's machine's processors in use, 0 to 1; None: unknown.
        environments: number of environments connected for training; 0 if unknown.
        environments_limit: number of environments that may act at once; 0: any number.
        device: figures of the device, by the names of progress.jsonl; empty if unknown.
        graphs: counts of CUDA graphs: metric -> "function" or "function/reason" -> count; empty if
            unknown.
        about: the device as text, as describe_device gives it; empty if unknown.
        in_flight: description of an update's rows, as text; empty if unknown.
        latency: histograms of acting; see murmur.doctor.latency.
        cache: place of the samples of a run with a source, "device" or "stream"; empty: the run has
            an environment. With a source `rows` are samples trained.
        rank: rank of a learner among several that share a run; 0 also of one alone.
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
    device: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    in_flight: str = ""
    latency: Buckets = field(default_factory=dict)
    cache: str = ""
    rank: int = 0
    graphs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


Look: TypeAlias = tuple[Snapshot, Snapshot]  # before and after


def learners_of(run: RunFolder) -> str:
    """Return the metrics addresses of a run's learners here; empty if there is at most one."""
    files = sorted(run.path.glob("learner*.json"))
    ports = [run.read_json(file.name).get("metrics_port") for file in files]
    alive = [run.process(file.name) for file in files]
    if len(files) < 2 or not all(ports) or not all(alive):
        return ""
    first = run.config().learner.metrics_host.split(",")[0].strip()
    host = "127.0.0.1" if "/" in first else own_client_host(first)  # of a network: any address
    return ",".join(f"http://{host_and_port(host, port)}" for port in ports if port)


def from_run(run: RunFolder, window_s: float | None) -> tuple[Snapshot, Snapshot]:
    """Read the last seconds of a run, from the end of its progress file.

    Args:
        run: the run's folder.
        window_s: length of the window [s]; None: at least WINDOW_S and UPDATES updates, at most
            MOST_S.

    Raises:
        ConfigError: if the run has logged too little.
    """
    records = (r for r in run.newest_records("progress") if "ledger" in r)
    last = next(records, None)
    if last is None:
        raise ConfigError(f"'{run.path}' has logged no progress yet; try again in a few seconds")
    first = None
    for record in records:
        seconds = last["time"] - record["time"]
        # The ledger starts from 0 with each process, and a clock may have been set back.
        if (
            seconds <= 0
            or seconds > (window_s or MOST_S)
            or not _same_process(record["ledger"], last["ledger"])
        ):
            break
        first = record
        enough = seconds >= WINDOW_S and last["updates"] - record["updates"] >= UPDATES
        if window_s is None and enough:
            break
    if first is None:
        raise ConfigError(f"'{run.path}' has logged too little; try again in a few seconds")
    about = run.read_json("command.json").get("device", {})
    return _from_record(first), replace(_from_record(last), about=about)


def _same_process(
    before: Mapping[str, Mapping[str, float]], last: Mapping[str, Mapping[str, float]]
) -> bool:
    """Return whether a ledger is an earlier state of another."""
    return all(
        sum(before.get(thread, {}).values()) <= sum(states.values())
        for thread, states in last.items()
    )


def _from_record(record: Mapping[str, Any]) -> Snapshot:
    steps, samples = record["env_steps"], record.get("samples", {})
    return Snapshot(
        record["time"],
        record["rows_trained" if samples else "rows_received"],
        record["updates"],
        record["device_busy_s"],
        record["ledger"],
        round(record["agent_steps"] / steps) if steps else 0,
        machine_busy=record["machine_busy"],
        environments=(record.get("rollout") or {}).get("environments", 0),
        environments_limit=record["environments_limit"],
        device=record.get("device", {}),  # records of before lack it
        in_flight=rollout_message(record),
        latency={
            name: {float(le): count for le, count in counts.items()}
            for name, counts in record.get("latency", {}).items()  # records of before lack it
        },
        cache=samples.get("cache", ""),
        graphs=record.get("graphs", {}),
    )


def from_metrics(
    urls: str, window_s: float | None, say: Callable[[str], None] = lambda line: None
) -> list[Look]:
    """Scrape the metrics endpoints twice, of one learner or of all that share a run.

    Args:
        urls: addresses of the endpoints, with commas between them.
        window_s: seconds between the looks; None: WINDOW_S, longer until UPDATES updates were made.
        say: function called when it takes longer.

    Returns:
        one pair for each learner, by rank.

    Raises:
        ConfigError: if one cannot be read, or they are not those of one run.
    """
    addresses = [url.strip() for url in urls.split(",")]
    first = [_scrape(url) for url in addresses]
    time.sleep(window_s or WINDOW_S)
    second = [_scrape(url) for url in addresses]
    while window_s is None and _too_few(first[0], second[0]):
        seconds = second[0].time - first[0].time
        if seconds >= LOOK_S:
            break
        made = round(second[0].updates - first[0].updates)
        say(f"{made} updates in {seconds:.0f} s; watching until it is {UPDATES}")
        time.sleep(WINDOW_S)
        second = [_scrape(url) for url in addresses]
    return _by_rank(list(zip(first, second, strict=True)), urls)


def _by_rank(looks: Sequence[Look], where: str) -> list[Look]:
    """Sort looks at the learners of one run by rank.

    Raises:
        ConfigError: if two of them are the same, or have no rank.
    """
    ranks = [after.rank for _, after in looks]
    if len(set(ranks)) < len(ranks):
        raise ConfigError(
            f"{where} are {len(ranks)} learners of ranks {sorted(ranks)}: give those of one run, "
            "each once"
        )
    return sorted(looks, key=lambda look: look[1].rank)


def _too_few(first: Snapshot, second: Snapshot) -> bool:
    """Return whether a learner at work made fewer than UPDATES updates between two looks."""
    busy = second.threads.get("learner", {}).get("forward", 0.0) > 0.0
    return busy and second.updates - first.updates < UPDATES


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
    return _snapshot(time.monotonic(), samples, address)  # only differences matter


def from_prometheus(url: str, window_s: float | None) -> list[Look]:
    """Return two snapshots from Prometheus of a learner, or of all that share a run.

    Args:
        url: address of Prometheus.
        window_s: seconds between the snapshots; None: WINDOW_S, doubled until it holds UPDATES
            updates.

    Returns:
        one pair for each learner, by rank.

    Raises:
        ConfigError: if it cannot be reached, or knows no learner, or more than one run's.
    """
    now = time.time()
    last = _stored(url, now)
    first = _stored(url, now - (window_s or WINDOW_S))
    ago = WINDOW_S
    while window_s is None and _too_few(first[0], last[0]) and ago < MOST_S:
        ago *= 2
        try:
            earlier = _stored(url, now - ago)
        except ConfigError:  # the run, or what Prometheus keeps, is younger
            break
        if earlier[0].rows > first[0].rows or not _same_process(
            earlier[0].threads, last[0].threads
        ):
            break  # another process's counters
        first = earlier
    then = {snapshot.rank: snapshot for snapshot in first}
    return [(then[after.rank], after) for after in last if after.rank in then]


def _stored(url: str, at: float) -> list[Snapshot]:
    """Return the snapshots of a run's learners in Prometheus at a time, by rank."""
    query = urllib.parse.urlencode(
        {"query": '{__name__=~"murmur_learner_.+"}', "time": f"{at:.3f}"}
    )
    address = f"{url.rstrip('/')}/api/v1/query?{query}"
    answer = json.loads(_get(address, "give Prometheus's address, like http://host:9090"))
    learners: dict[tuple[str, str], list[tuple[str, Mapping[str, str], float]]] = {}
    for found in answer["data"]["result"]:
        labels = found["metric"]
        learner = labels.get("rank", ""), labels.get("instance", "")
        sample = (labels["__name__"], labels, float(found["value"][1]))
        learners.setdefault(learner, []).append(sample)
    ranks = [rank for rank, _ in learners]
    if not learners or len(set(ranks)) < len(ranks) or (len(ranks) > 1 and "" in ranks):
        raise ConfigError(
            f"Prometheus at {url} knows {len(learners)} learners at that time "
            f"{sorted(instance for _, instance in learners)}; give the metrics addresses of one "
            "run instead"
        )
    snapshots = [_snapshot(at, samples, url) for samples in learners.values()]
    return sorted(snapshots, key=lambda snapshot: snapshot.rank)


def _get(address: str, hint: str) -> str:
    try:
        host = urllib.parse.urlsplit(address).hostname or ""
        # None: those of the environment
        proxies: dict[str, str] | None = {} if is_loopback(host) else None
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
        with opener.open(address, timeout=10) as response:  # the user's own address
            text: str = response.read().decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"cannot read {address.split('?')[0]}: {reason}; {hint}") from None
    return text


def _snapshot(
    at: float, samples: Sequence[tuple[str, Mapping[str, str], float]], where: str
) -> Snapshot:
    cache, rank = "", "0"
    single: dict[str, float] = {}
    device: dict[str, float] = {}
    latency: dict[str, dict[float, float]] = {}
    about: dict[str, str] = {}
    threads: dict[str, dict[str, float]] = {}
    graphs: dict[str, dict[str, float]] = {}
    # Sort the samples by kind; some labels become keys, others are properties of the run.
    for name, labels, value in samples:
        rank = labels.get("rank", rank)
        short = name.removeprefix(_PREFIX)
        if "graph" in labels:
            function = "/".join(labels[key] for key in ("graph", "reason") if key in labels)
            graphs.setdefault(short.removesuffix("_total"), {})[function] = value
        if short == "state_seconds_total":
            threads.setdefault(labels["thread"], {})[labels["state"]] = value
        elif short in ("acting_seconds_bucket", "inference_seconds_bucket"):
            of = latency.setdefault(labels.get("phase", "inference"), {})
            of[float(labels["le"])] = value
        elif short == "sessions" and labels.get("mode") not in ("train", "supply"):
            continue
        elif short == "sample_cache":
            cache = labels["cache"]
        elif short == "device_info":
            about = dict(labels)
        elif (figure := _device_figure(short, labels)) is not None:
            device[figure] = device.get(figure, 0.0) + value
        else:
            single[short] = value
    rows, thread = "rows_received_total", "inference"
    # A run on samples has no inference thread; its rows are the samples trained.
    if cache:
        rows, thread = "rows_trained_total", "learner"
    if rows not in single or thread not in threads:
        raise ConfigError(f"{where} serves no metrics of a learner that has begun its run")
    steps = single.get("env_steps_total", 0)
    return Snapshot(
        at,
        single[rows],
        single.get("updates_total", 0.0),
        single.get("device_busy_seconds_total", 0.0),
        threads,
        round(single.get("agent_steps_total", 0) / steps) if steps else 0,
        int(single.get("sessions", 0)),
        single.get("machine_busy_ratio"),
        int(single.get("environments", 0)),
        int(single.get("environments_limit", 0)),
        device,
        about,
        latency=latency,
        cache=cache,
        rank=int(rank),
        graphs=graphs,
    )


def _device_figure(name: str, labels: Mapping[str, str]) -> str | None:
    """Return the name of a device's metric in progress.jsonl; None if it is another metric."""
    if name.startswith("gpu_"):
        kinds = [labels[key] for key in ("clock", "reason", "direction") if key in labels]
        return "_".join([name.removeprefix("gpu_"), *kinds])
    if name == "device_copied_bytes_total":
        return f"copied_{labels['direction']}_bytes"
    return _DEVICE_FIGURES.get(name)
