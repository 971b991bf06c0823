"""Fuzz targets, guided by coverage.

    python -m tests.fuzz codec session --cases 1000000
    python -m tests.fuzz --save     all targets; written to benchmarks/results/fuzz.json, .md

Each target runs in a process of its own under atheris (libFuzzer), from its seeds and the committed
corpus. The first case that raises ends it; the case is kept as a file, whose name is printed.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

from murmur.results import provenance, require_clean_source, run_command
from tests.fuzz import TARGETS

CORPUS = Path(__file__).parent / "corpus"
_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_MAX_BYTES = 512


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="keep the result and a small corpus")
    parser.add_argument("--add", action="store_true", help="save: to the cases that are there")
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"no target {', '.join(unknown)}; known: {', '.join(TARGETS)}")
    if arguments.inner:
        _fuzz_here(arguments.targets[0], arguments.cases, arguments.seed, Path(arguments.inner))
        return
    if arguments.save:
        require_clean_source(arguments.dirty)
    origin = provenance("tests.fuzz")  # before the corpus changes
    found = {}
    for target in arguments.targets or TARGETS:
        found[target] = fuzz(target, arguments.cases, arguments.seed, arguments.save)
        if arguments.save:
            save(target, found[target], arguments.add, origin)
    raise SystemExit(any(result["findings"] for result in found.values()))


def fuzz(target: str, cases: int, seed: int, keep_corpus: bool) -> dict[str, Any]:
    """Run one target in a process of its own; returns its result."""
    print(f"{target}: {cases} cases", flush=True)
    with tempfile.TemporaryDirectory(prefix="murmur-fuzz-") as name:
        command = [sys.executable, "-m", "tests.fuzz", target, "--inner", name]
        command += ["--cases", str(cases), "--seed", str(seed)]
        began = time.monotonic()
        run = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        seconds = time.monotonic() - began
        outcomes = json.loads((Path(name) / "outcomes.json").read_text() or "{}")
        status = re.findall(r"#(\d+)\s+\w+\s+cov: (\d+) ft: \d+ corp: (\d+)/", run.stderr)
        if run.returncode:
            print(run.stderr[-4000:])
        if keep_corpus and not run.returncode:
            _keep(target, Path(name) / "corpus")
    result = {
        "cases": sum(outcomes.values()),
        "seconds": round(seconds),
        "coverage_points": int(status[-1][1]) if status else 0,
        "corpus_inputs": int(status[-1][2]) if status else 0,
        "findings": int(run.returncode != 0),
        "outcomes": outcomes,
    }
    print(json.dumps(result), flush=True)
    return result


def _fuzz_here(target: str, cases: int, seed: int, folder: Path) -> None:
    """Fuzz in this process; libFuzzer ends it."""
    import atheris

    # Found out without instrumentation: what is imported for a second time would not be traced.
    with atheris.instrument_imports(include=_modules(target)):
        module = import_module(f"tests.fuzz.{target}")
    outcomes: Counter[str] = Counter()
    (folder / "outcomes.json").write_text("")
    (folder / "corpus").mkdir()
    for i, data in enumerate(module.SEEDS):
        (folder / "corpus" / f"seed-{i}").write_bytes(data)

    def one(data: bytes) -> None:
        outcomes[module.one(data)] += 1
        if sum_of_cases() >= cases:
            (folder / "outcomes.json").write_text(json.dumps(dict(outcomes.most_common())))

    counted = 0

    def sum_of_cases() -> int:
        nonlocal counted
        counted += 1
        return counted

    committed = [str(CORPUS / target)] if (CORPUS / target).is_dir() else []
    options = [f"-runs={cases}", f"-seed={seed}", f"-max_len={_MAX_BYTES}", "-rss_limit_mb=3000"]
    options += ["-timeout=20", f"-artifact_prefix={target}-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, str(folder / "corpus"), *committed], one)
    atheris.Fuzz()


def _modules(target: str) -> list[str]:
    """MODULES of a target, without importing it."""
    text = (Path(__file__).parent / f"{target}.py").read_text()
    found = re.search(r"^MODULES = \((.*?)\)", text, re.MULTILINE | re.DOTALL)
    assert found
    return re.findall(r'"([\w.]+)"', found[1])


def _keep(target: str, corpus: Path, most: int = 40) -> None:
    """A few of the inputs that reached something new, small ones and large, as the new corpus."""
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    inputs = {path.name[:16]: path.read_bytes() for path in (*folder.iterdir(), *corpus.iterdir())}
    names = sorted(inputs, key=lambda name: (len(inputs[name]), name))
    kept = {names[i * len(names) // most] for i in range(most)}
    for path in folder.iterdir():
        path.unlink()
    for name in kept:
        (folder / name).write_bytes(inputs[name])


def save(target: str, result: dict[str, Any], add: bool, origin: dict[str, Any]) -> None:
    """Put a result into benchmarks/results/fuzz.json, or add its cases, and write the table."""
    file = _RESULTS / "fuzz.json"
    record = json.loads(file.read_text()) if file.is_file() else {"result": {}}
    record |= {"benchmark": "fuzz", **origin}
    if add and target in record["result"]:
        before = record["result"][target]
        for key in ("cases", "seconds", "findings"):
            result[key] += before[key]
        outcomes = Counter(before["outcomes"]) + Counter(result["outcomes"])
        result["outcomes"] = dict(outcomes.most_common())
    result |= {"date": origin["date"], "commit": origin["commit"]}
    record["result"][target] = result
    file.write_text(json.dumps(record, indent=1) + "\n")
    lines = [
        "# Fuzzing",
        "",
        "`python -m tests.fuzz --cases 1000000 --save`: each target guided by coverage (atheris), "
        f"on {record['machine']['cores']} shared cores ({record['machine']['cpu']}). A case is one "
        "call of the target's `one`; a finding ends the target. Date and commit are those of a "
        "target's last cases.",
        "",
        "| target | cases | findings | branches reached | s | date | commit | outcome |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for target, r in record["result"].items():
        outcomes = ", ".join(f"{k} {v}" for k, v in r["outcomes"].items())
        when = f"{r['date'][:10]} | {r['commit']}"
        lines.append(
            f"| {target} | {r['cases']} | {r['findings']} | {r['coverage_points']} | "
            f"{r['seconds']} | {when} | {outcomes} |"
        )
    file.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    run_command(main)
