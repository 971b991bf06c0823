"""docs/metrics.md, written from the tables in the code: `python -m murmur.metrics_doc`."""

from collections.abc import Iterable

from env_service.metrics import METRICS as ENV_METRICS
from learner_service.telemetry.metrics import METRICS as LEARNER_METRICS

_HEAD = """\
# Metrics

Both services serve Prometheus text at `/metrics` and their health at `/healthz`: the learner on
`learner.metrics_port` (9101), an environment server on `env_server.metrics_port` (9102). This page
is written by `python -m murmur.metrics_doc`; a test compares it with the code.

The learner also serves the `process_*` of Prometheus's Python client: CPU seconds, memory, files.
A histogram `x` is served as `x_bucket`, `x_sum` and `x_count`; counters end in `_total`.

Environment rows balance: `rows_received` = `rows_trained` + `rows_dropped` + what is held, which is
`rows_stored`, the unrolls being filled, and one row for each environment of a parked session. With
a replay rows are trained many times: there `rows_inserted` stands for `rows_trained`, and
`rows_stored` says how many of them the replay holds. A row that ends one unroll and begins the next
counts once.

The learner's counters go on where they were when it is started again, also after SIGKILL: they lie
in `counters.bin` of the run's folder. `murmur_env_steps_total` less `rows_received` is what was
lost on the way; [reliability.md](reliability.md) says how much that may be.
"""


def render() -> str:
    """The page."""
    learner = (
        (
            f"murmur_learner_{m.name}" + ("_total" if m.kind == "counter" else ""),
            m.kind,
            m.labels,
            m.meaning,
            m.remedy,
        )
        for m in LEARNER_METRICS
    )
    return "\n".join([_HEAD, "## Learner\n", *_table(learner), "\n## Environment server\n"]) + (
        "\n" + "\n".join(_table(ENV_METRICS)) + "\n"
    )


def _table(rows: Iterable[tuple[str, str, tuple[str, ...], str, str]]) -> list[str]:
    """A Markdown table: name, kind, labels, meaning, remedy."""
    lines = ["| metric | kind | labels | meaning | if it looks wrong |", "|---|---|---|---|---|"]
    for name, kind, labels, meaning, remedy in rows:
        named = ", ".join(f"`{label}`" for label in labels)
        cells = [f"`{name}`", kind, named, meaning, remedy]
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return lines


if __name__ == "__main__":
    print(render(), end="")
