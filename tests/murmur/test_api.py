"""The Python API: trainings equal those of the command; Python code watches and stops them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import murmur
from murmur.doctor.machine import ROOT
from murmur.runs.run_folder import RunFolder
from murmur.shared.config.files import load, save
from murmur.shared.process.process import run_coroutine
from tests.same_weights import digest

SYNC: dict[str, Any] = {
    "environment": {"name": "spread", "episode_steps": 10},
    "env_server": {"num_workers": 1, "envs_per_worker": 8, "sessions_per_worker": 2},
    "algorithm": {"name": "coma", "batch_size": 60, "batch_number": 4, "data_passes": 2},
    "network": {"name": "mlp", "hidden": [32]},
    "learner": {"pipeline": "sync", "log_every_s": 1e-6, "checkpoint_every_updates": 3},
    "evaluation": {"every_updates": 2, "episodes": 4},
    "run": {"max_updates": 5},
}
SYNC["env_server"]["metrics_port"] = SYNC["learner"]["metrics_port"] = SYNC["learner"]["port"] = 0


def weights(run: Path) -> str:
    state = torch.load(run / "checkpoints" / "update-000005.pt", weights_only=True)
    return digest(state["algorithm"])


@pytest.mark.long
@pytest.mark.system
def test_a_run_starts_from_a_run(tmp_path: Path) -> None:
    """With next to no learning rate its weights stay those of the first run's best checkpoint."""
    first = murmur.train(SYNC, run=tmp_path / "first", progress=False)
    still = {"algorithm.actor_lr": 1e-30, "algorithm.critic_lr": 1e-30, "run.max_updates": 1}
    second = murmur.train(SYNC, still, start_from=first, run=tmp_path / "second", progress=False)
    kept = json.loads((second.path / "started_from.json").read_text())
    assert kept["checkpoint"] == str(first.path / "checkpoints" / "best.pt")
    before, after = (
        torch.load(file, weights_only=True)["algorithm"]["parts"]["actor"]
        for file in (kept["checkpoint"], second.path / "checkpoints" / "update-000001.pt")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_import_is_light_and_names_the_extra_that_is_missing() -> None:
    code = (
        "import sys, murmur; print(sorted({'numpy', 'torch', 'grpc'} & set(sys.modules)))\n"
        "murmur.train, murmur.config, murmur.make_env, murmur.Run\n"
        "print('torch' in sys.modules, set(murmur.__all__) <= set(dir(murmur)))\n"
        "sys.modules['torch'] = None\n"
        "try:\n    murmur.load\nexcept murmur.MurmurError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    light, kept, missing = done.stdout.splitlines()
    assert light == "[]"
    assert kept == "False True"
    assert missing.startswith("this needs 'torch', which is not installed: ")
    assert all(hasattr(murmur, name) for name in murmur.__all__)


@pytest.mark.long
@pytest.mark.system
def test_training_is_the_commands_to_the_bit_and_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "sync.yaml"
    file.write_text(yaml.safe_dump(SYNC))
    command = ["train", str(file), "--run", str(tmp_path / "command"), "--set", "run.seed=3"]
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    seen: list[Mapping[str, Any]] = []
    with subprocess.Popen(
        [sys.executable, "-m", "murmur", *command], stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        run = murmur.train(
            SYNC,
            seed=3,
            run=tmp_path / "api",
            callbacks=[lambda run, record: seen.append(record)],
            progress=False,
        )
        process.communicate(timeout=120)
    assert process.returncode == 0
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert weights(run.path) == weights(tmp_path / "command")
    assert run.config.run.name == "spread"
    assert {record["kind"] for record in seen} == {"progress", "evaluation"}
    assert not run.running
    assert run.wait()  # nothing is under way

    metrics, evaluations = run.metrics(), run.evaluations()
    assert metrics["updates"].tolist() == [r["updates"] for r in seen if r["kind"] == "progress"]
    assert metrics["losses.critic_loss"].nunique() == 5
    assert metrics["metrics.occupied"].notna().all()
    returns = [r["metrics"]["return"]["mean"] for r in seen if r["kind"] == "evaluation"]
    assert evaluations["return"].tolist() == returns
    assert (evaluations["return.low"] <= evaluations["return"]).all()
    assert run.latest() == run.path / "checkpoints" / "update-000005.pt"
    assert run.best().name == "best.pt"
    assert murmur.Run(run.path).path == run.path
    assert json.loads((run.path / "command.json").read_text())["command"] == (
        "murmur.train(configuration, ['run.seed=3'])"
    )


ENDLESS = {"run.max_updates": 0, "evaluation.every_updates": 0, "learner.pipeline": "async"}


@pytest.mark.system
def test_callback_stops_a_training_in_the_background(tmp_path: Path) -> None:
    threads: set[threading.Thread] = set()

    def stop_soon(run: murmur.Run, record: Mapping[str, Any]) -> None:
        threads.add(threading.current_thread())
        if record["updates"] >= 2:
            run.stop()

    with murmur.train(
        SYNC, ENDLESS, run=tmp_path / "run", callbacks=[stop_soon], wait=False
    ) as run:
        with pytest.raises(murmur.MurmurError, match="in use by"):
            murmur.train(SYNC, run=run)
        assert run.running
        assert run.wait(120)
    assert threading.current_thread() not in threads
    assert len(threads) == 1
    assert not run.running
    saved = int(run.latest().stem.removeprefix("update-"))
    assert saved == run.metrics()["updates"].max() >= 2


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, which it does not in a shell's background job."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
@pytest.mark.system
@pytest.mark.usefixtures("interruptible")
def test_errors_and_interrupts_stop_a_training_and_are_raised(tmp_path: Path) -> None:
    calls = []

    def fail(run: murmur.Run, record: Mapping[str, Any]) -> None:
        calls.append(record)
        raise ZeroDivisionError("of a callback")

    def answer(run: murmur.Run, record: Mapping[str, Any]) -> Any:
        return record["updates"] < 0

    def interrupt(run: murmur.Run, record: Mapping[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)

    run = tmp_path / "run"
    for callback, error, words in (
        (fail, ZeroDivisionError, "of a callback"),
        (answer, murmur.MurmurError, "callback 'answer' returned False; call run.stop()"),
        (interrupt, KeyboardInterrupt, None),
    ):
        again: dict[str, Any] = {"config": None, "resume": True} if run.exists() else {}
        with pytest.raises(error, match=words):
            murmur.train(
                **{"config": SYNC, **again},
                overrides=ENDLESS,
                run=run,
                callbacks=[callback],
                progress=False,
            )
        assert len(calls) == 1
        assert not murmur.Run(run).running
        assert murmur.Run(run).latest().is_file()
        assert not (run / "resume.yaml").exists()
    again = murmur.train(resume=True, overrides=ENDLESS, run=run, wait=False)
    begun = again.metrics()["updates"].max()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        again.wait(120)
    assert not again.running
    assert again.metrics()["updates"].max() >= begun


def test_a_run_without_records_has_empty_columns(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save(murmur.config(SYNC), folder.path / "config.yaml")
    run = murmur.Run(tmp_path)
    assert run.metrics()[["env_steps", "return"]].empty
    assert run.evaluations()[["updates", "return", "return.low", "return.high"]].empty


def test_coroutines_run_where_a_loop_runs_already() -> None:
    async def add(a: int, b: int) -> int:
        await asyncio.sleep(0)
        if b < 0:
            raise ZeroDivisionError
        return a + b

    async def notebook() -> tuple[int, threading.Thread]:
        with pytest.raises(ZeroDivisionError):
            run_coroutine(add(1, -1))
        return run_coroutine(add(1, 2)), threading.current_thread()

    assert run_coroutine(add(1, 2)) == 3
    assert asyncio.run(notebook()) == (3, threading.current_thread())


def test_overrides_as_mappings_and_as_text() -> None:
    base = load("formation", [], {})
    mapping = {"run.max_minutes": np.float64(5), "environment": {"num_followers": 1}}
    changed = load("formation", mapping, {})
    assert changed.run.max_minutes == 5
    assert changed.run.max_updates == base.run.max_updates == 250
    assert changed.environment.options == {**base.environment.options, "num_followers": 1}
    assert load("formation", {"run": {}, "environment": {}}, {}) == base
    assert load("formation", "run.max_minutes=5", {}).run.max_minutes == 5
    assert load("formation", ["run={max_minutes: 5}"], {}).run.max_updates == 0  # replaced
    other = load("formation", {"algorithm": {"name": "qmix", "lr": 0.01}}, {})
    assert other.algorithm.options == {"lr": 0.01}
    start = load("formation", {"run.start_from": Path("runs/one")}, {})
    assert start.run.start_from == "runs/one"
    on_top = load({"extends": "formation", "run": {"seed": 9}}, {}, {})
    assert (on_top.run.seed, on_top.run.max_updates, on_top.run.name) == (9, 250, "formation")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"run.max_minuts": 5}, "did you mean 'max_minutes'"),
        ({"run.seed": object()}, "override run.seed: .* is a object; a configuration holds text"),
        ({"run..seed": 1}, "override 'run..seed': write the key as 'section.key'"),
        ({7: 1}, "override 7: write the key as 'section.key'"),
        ({"run.name": "a\0b"}, "contains a NUL character"),
        ("run.seed", "write it as section.key=value"),
    ],
)
def test_wrong_overrides_are_named(overrides: Any, words: str) -> None:
    with pytest.raises(murmur.MurmurError, match=words):
        murmur.config("spread", overrides)


def test_wrong_calls_are_told_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for call, words in (
        (lambda: murmur.train(run=folder), "which configuration"),
        (
            lambda: murmur.train("spread", {"run.seed": 1}, seed=2, run=folder),
            "seed 2 and override run.seed=1 are the same key: give one",
        ),
        (
            lambda: murmur.train("spread", "run.start_from=a", start_from="b", run=folder),
            "start_from .*/b and --set run.start_from=a are the same key: give one",
        ),
        (
            lambda: murmur.train(start_from="a", resume=True),
            "starts a new run, resuming continues one",
        ),
        (lambda: murmur.train(SYNC, resume=True, run=folder), "a resumed run has its own"),
        (lambda: murmur.train("spreat", run=folder), "did you mean 'spread'"),
        (
            lambda: murmur.train("spread", {"environment.agents": 1}, run=folder),
            "environment.agents",
        ),
        (
            lambda: murmur.train("spread", run=folder, callbacks=print),  # type: ignore[arg-type]
            "callbacks: give a list of functions",
        ),
        (lambda: murmur.train("spread", run=folder, learners=0), "learners=0: give 1 or more"),
        (
            lambda: murmur.train("spreat", seed=np.int64(2), run=folder),  # type: ignore[arg-type]
            "did you mean 'spread'",
        ),
        (lambda: murmur.Run(folder), "does not exist"),
        (lambda: murmur.make_env("spread", 0), "num_envs=0"),
        (lambda: murmur.make_env("faces"), "has a source, no environment"),
    ):
        with pytest.raises(murmur.MurmurError, match=words):
            call()
    assert not folder.exists()


def test_checked_configuration_is_complete_and_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MURMUR__RUN__SEED", "5")
    config = murmur.config("spread", {"algorithm.gamma": 0.9})
    assert config.run.seed == 5
    assert config.algorithm.options["gae_lambda"] > 0  # the plug-in's own default
    monkeypatch.setenv("MURMUR__RUN__SEED", "6")
    assert murmur.config(config) == config
    with pytest.raises(murmur.MurmurError, match=r"algorithm\.gama"):
        murmur.config("spread", {"algorithm.gama": 0.9})


def test_environments_by_configuration_name_and_factory() -> None:
    for made in (
        murmur.make_env("spread", 2, {"environment.num_agents": 4}),
        murmur.make_env(murmur.config("spread", {"environment.num_agents": 4}), 2),
        murmur.make_env({"environment": {"name": "spread", "num_agents": 4}}, 2),
    ):
        assert (made.num_envs, made.spec.num_agents) == (2, 4)
    assert murmur.make_env("memory", overrides={"environment.delay": 2}).spec.name == "memory"
    paced = murmur.make_env("tests.system.paced_environment:Paced", 2, {"arguments.delay_ms": 0})
    assert paced.num_envs == 2
    assert paced.reset(np.arange(2, dtype=np.uint64)).step_type.tolist() == [0, 0]
