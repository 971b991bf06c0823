"""Counters of a learner at two moments: from its metrics port, Prometheus or its log."""

import json
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from murmur.doctor.latency import Buckets
from murmur.runs.drops import rollout_message
from murmur.runs.run_folder import RunFolder
from murmur.runs.servers import Sample, Servers, read_page, recorded, samples_of, servers_of
from murmur.shared.process.addresses import host_and_port, own_client_host
from murmur.shared.process.errors import ConfigError

_PREFIX = "murmur_learner_"
WINDOW_S = 30.0  # looked at, where nothing else is asked for: longer if updates take longer
MOST_S = 3600.0
LOOK_S = 300.0  # the longest that a live learner is watched if asked for a long look
# Metrics by their names without prefix and "_total", and what progress.jsonl calls them.
_OF_DEVICE = ("device_memory_bytes", "acts_waited", "acts_waited_seconds")
_WORK = {
    "process_cpu_seconds": "cpu_s",
    "thread_cpu_seconds": "cpu_s",
    "thread_cpu_wait_seconds": "cpu_wait_s",
    "batch_envs_count": "batches",
}
_RENAMED = {
    "device_busy_seconds": "device_busy_s",
    "machine_busy_ratio": "machine_busy",
    "machine_busy_seconds": "machine_busy_s",
    "machine_cores": "cores",
}
FEWEST_S = 10.0  # of a live learner: counters of servers grow a few times a second
SAY_EVERY_S = 5.0
_STORED = "murmur_(learner|env)_.+|process_cpu_seconds_total"
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
        rows_trained: environment rows that updates took.
        batches: batches of requests that were acted on.
        cpu_s: CPU seconds of the learner's threads by name, and of its process, "".
        cpu_wait_s: seconds that these threads waited for a processor.
        machine_busy_s: CPU seconds of any program on the learner's machine.
        cores: processors that the learner may use; 0: unknown, and so is the former.
        servers: counters of the environment servers; None: unknown.
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
    rows_trained: float = 0.0
    batches: float = 0.0
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    cpu_wait_s: Mapping[str, float] = field(default_factory=dict)
    machine_busy_s: float = 0.0
    cores: float = 0.0
    servers: Servers | None = None


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
            or not _rows(record)  # it starts
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
    return with_servers((_from_record(first), replace(_from_record(last), about=about)), run)


def with_servers(look: Look, run: RunFolder, shift_s: float = 0.0) -> Look:
    """Add the counters of the servers that `murmur train` started, if they are not known yet.

    Args:
        look: a look at the learner of the run.
        run: folder of the run.
        shift_s: seconds to add to the times of the look to get seconds since 1970.
    """
    before, after = look
    if after.servers is not None:
        return look
    both = recorded(run, before.time + shift_s, after.time + shift_s)
    if both is None:
        return look
    return replace(before, servers=both[0]), replace(after, servers=both[1])


def _same_process(
    before: Mapping[str, Mapping[str, float]], last: Mapping[str, Mapping[str, float]]
) -> bool:
    """Return whether a ledger is an earlier state of another."""
    return all(
        sum(before.get(thread, {}).values()) <= sum(states.values())
        for thread, states in last.items()
    )


def _rows(record: Mapping[str, Any]) -> float:
    """Return the rows received, or of a run on samples those trained."""
    rows: float = record["rows_trained" if record.get("samples") else "rows_received"]
    return rows


def _from_record(record: Mapping[str, Any]) -> Snapshot:
    steps, samples = record["env_steps"], record.get("samples", {})
    work = record.get("work", {})  # records of before lack it
    return Snapshot(
        record["time"],
        _rows(record),
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
        rows_trained=record.get("rows_trained", 0.0),
        batches=work.get("batches", 0.0),
        cpu_s={name.partition("/")[2]: s for name, s in work.items() if name.startswith("cpu_s")},
        cpu_wait_s={
            name.partition("/")[2]: s for name, s in work.items() if name.startswith("cpu_wait_s")
        },
        machine_busy_s=record.get("machine_busy_s", 0.0),
        cores=record.get("cores", 0.0),
    )


def from_metrics(
    urls: str,
    window_s: float | None,
    say: Callable[[str], None] = lambda line: None,
    most_s: float = WINDOW_S,
) -> list[Look]:
    """Scrape the metrics endpoints twice, of one learner or of all that share a run.

    Args:
        urls: addresses of the endpoints, with commas between them; those of environment servers
            may be among them.
        window_s: seconds between the looks; None: as many as UPDATES updates take, FEWEST_S to
            `most_s`.
        say: function called with lines about the wait.
        most_s: the longest look without a given window [s].

    Returns:
        one pair for each learner, by rank.

    Raises:
        ConfigError: if one cannot be read, or they are not those of one run.
    """
    addresses = [url.strip() for url in urls.split(",")]
    first = _scrape(addresses)
    until = first[0].time + (window_s or most_s)
    told = time.monotonic()
    while True:
        wait = min(window_s or FEWEST_S, max(until - time.monotonic(), 0.01))
        time.sleep(wait)
        second = _scrape(addresses)
        seconds = second[0].time - first[0].time
        if window_s is not None or second[0].time >= until or not _too_few(first[0], second[0]):
            break
        if time.monotonic() - told >= SAY_EVERY_S:
            told, made = time.monotonic(), round(second[0].updates - first[0].updates)
            say(f"{made} of {UPDATES} updates in {seconds:.0f} s; {most_s:.0f} s at most")
    looks = list(zip(first, second, strict=True))
    ranks = [after.rank for _, after in looks]
    if len(set(ranks)) < len(ranks):
        raise ConfigError(
            f"{urls} are {len(ranks)} learners of ranks {sorted(ranks)}: give those of one run, "
            "each once"
        )
    return sorted(looks, key=lambda look: look[1].rank)


def _too_few(first: Snapshot, second: Snapshot) -> bool:
    """Return whether a learner made fewer than UPDATES updates between two looks."""
    return second.updates - first.updates < UPDATES


def _scrape(addresses: Sequence[str]) -> list[Snapshot]:
    """Return snapshots of the learners, each with the counters of the servers among the pages."""
    learners: list[tuple[float, list[Sample], str]] = []
    servers: dict[str, list[Sample]] = {}
    for url in addresses:
        address = url.rstrip("/")
        if not address.endswith("/metrics"):
            address += "/metrics"
        text = read_page(
            address, "a learner's metrics port is in its run's learner.json, 9101 if that was free"
        )
        samples = samples_of(text)
        if any(name == "murmur_env_info" for name, *_ in samples):
            servers[address] = samples
        else:
            learners.append((time.monotonic(), samples, address))  # only differences matter
    if not learners:
        raise ConfigError(f"{', '.join(addresses)}: none is a learner's; give its metrics, too")
    seen = servers_of(time.monotonic(), servers, learners[0][2])
    return [replace(_snapshot(*learner), servers=seen) for learner in learners]


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
    query = urllib.parse.urlencode({"query": f"{{__name__=~{json.dumps(_STORED)}}}", "time": at})
    address = f"{url.rstrip('/')}/api/v1/query?{query}"
    answer = json.loads(read_page(address, "give Prometheus's address, like http://host:9090"))
    pages: dict[tuple[str, str], list[Sample]] = {}  # by rank and instance
    for found in answer["data"]["result"]:
        labels = found["metric"]
        page = pages.setdefault((labels.get("rank", ""), labels.get("instance", "")), [])
        page.append((labels["__name__"], labels, float(found["value"][1])))
    learners = {
        key: page for key, page in pages.items() if any(n.startswith(_PREFIX) for n, *_ in page)
    }
    ranks = [rank for rank, _ in learners]
    if not learners or len(set(ranks)) < len(ranks) or (len(ranks) > 1 and "" in ranks):
        raise ConfigError(
            f"Prometheus at {url} knows {len(learners)} learners at that time "
            f"{sorted(instance for _, instance in learners)}; give the metrics addresses of one "
            "run instead"
        )
    servers = servers_of(
        at, {name: page for (_, name), page in pages.items()}, next(iter(learners))[1]
    )
    snapshots = [replace(_snapshot(at, page, url), servers=servers) for page in learners.values()]
    return sorted(snapshots, key=lambda snapshot: snapshot.rank)


def _snapshot(at: float, samples: Sequence[Sample], where: str) -> Snapshot:
    """Return a snapshot by a page of metrics, read as a record of progress.jsonl has them."""
    rank, about = "0", dict[str, str]()
    record: dict[str, Any] = {
        "time": at,
        **dict.fromkeys(("updates", "device_busy_s", "env_steps", "agent_steps"), 0.0),
        **dict.fromkeys(("environments_limit", "environments", "sessions"), 0),
        "machine_busy": None,
        **{key: {} for key in ("ledger", "latency", "graphs", "device", "work")},
    }
    # Sort the samples by kind; some labels become keys, others are properties of the run.
    for name, labels, value in samples:
        rank = labels.get("rank", rank)
        short = name.removeprefix(_PREFIX).removesuffix("_total")
        if "graph" in labels:
            function = "/".join(labels[key] for key in ("graph", "reason") if key in labels)
            record["graphs"].setdefault(short, {})[function] = value
        if short == "state_seconds":
            record["ledger"].setdefault(labels["thread"], {})[labels["state"]] = value
        elif short in _WORK:
            record["work"]["/".join([_WORK[short], *filter(None, [labels.get("thread")])])] = value
        elif short in ("acting_seconds_bucket", "inference_seconds_bucket"):
            of = record["latency"].setdefault(labels.get("phase", "inference"), {})
            of[labels["le"]] = value
        elif short == "sessions" and labels.get("mode") not in ("train", "supply"):
            continue
        elif short == "sample_cache":
            record["samples"] = {"cache": labels["cache"]}
        elif short == "device_info":
            about = dict(labels)
        elif (figure := _device_figure(short, labels)) is not None:
            record["device"][figure] = record["device"].get(figure, 0.0) + value
        else:
            record[_RENAMED.get(short, short)] = value
    # A run on samples has no inference thread; its rows are the samples trained.
    rows, thread = "rows_received", "inference"
    if "samples" in record:
        rows, thread = "rows_trained", "learner"
    if rows not in record or thread not in record["ledger"]:
        raise ConfigError(f"{where} serves no metrics of a learner that has begun its run")
    return replace(
        _from_record(record),
        sessions=int(record["sessions"]),
        environments=int(record["environments"]),
        environments_limit=int(record["environments_limit"]),
        about=about,
        rank=int(rank),
    )


def _device_figure(name: str, labels: Mapping[str, str]) -> str | None:
    """Return the name of a device's metric in progress.jsonl; None if it is another metric.

    Metrics of one name are summed over their labels.
    """
    if name.startswith("gpu_"):
        kinds = [labels[key] for key in ("clock", "reason", "direction") if key in labels]
        return "_".join([name.removeprefix("gpu_"), *kinds])
    if name == "device_copied_bytes":
        return f"copied_{labels['direction']}_bytes"
    if name in _OF_DEVICE or "graph" in labels:
        return name.removeprefix("device_")
    return None
