"""The environment server in C++ keeps the contract, plays murmur's spread, and feeds a run."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from murmur.doctor.machine import ROOT
from murmur.env_service.envs.spread import Config, make
from murmur.kit.certs import make_certificates
from murmur.kit.conformance.checklist import Checklist
from murmur.kit.conformance.environments import Play, RowRules, legal_action
from murmur.kit.conformance.examine import Examination
from murmur.kit.conformance.peer import Peer, Session, Status
from murmur.kit.conformance.play import welcome
from murmur.runs.run_folder import RunFolder
from murmur.shared.rpc import PROTOCOL_VERSION
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.credentials import CredentialFolder
from murmur.shared.wire.seeding import episode_seeds
from murmur.shared.wire.spec import spec_from_proto
from murmur.shared.wire.timestep import Array, StepType
from tests.chaos.stack import free_port
from tests.waiting import wait_until

FOLDER = ROOT / "examples" / "cpp"
BREAKING = Path(__file__).parent / "breaking.cpp"
Build = Callable[[Path], str]


def test_the_proto_states_the_version_of_the_protocol() -> None:
    assert pb.PROTOCOL_VERSION == PROTOCOL_VERSION


def test_the_server_has_at_most_400_lines_of_code() -> None:
    lines = [
        line.strip() for file in FOLDER.glob("*.[ch]pp") for line in file.read_text().splitlines()
    ]
    assert 0 < sum(not line.startswith("//") for line in lines if line) <= 400


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compile a server; returns its path."""
    missing = [tool for tool in ("cmake", "g++", "protoc") if not shutil.which(tool)]
    if not Path("/usr/include/grpcpp/grpcpp.h").exists():
        missing.append("libgrpc++-dev")
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)}")

    def compiled(source: Path) -> str:
        folder = tmp_path_factory.mktemp(source.stem)
        for command in (
            ["cmake", "-S", str(FOLDER), "-B", str(folder), f"-DSERVER={source}"],
            ["cmake", "--build", str(folder)],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        return str(folder / "server")

    return compiled


@pytest.fixture(scope="module")
def spread(build: Build) -> str:
    return build(FOLDER / "spread.cpp")


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process; at the end it is told to stop, and must do so with code 0."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MURMUR")}
    with (
        log.open("ab") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            code = process.wait(60)
    assert code == 0, log.read_text()


def untested(checklist: Checklist) -> set[str]:
    assert checklist.problems == {}
    return {key for key, held, _ in checklist.verdicts() if held is None}


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(900)  # twelve processes, one after the other
def test_cpp_server_keeps_the_whole_contract(spread: str, tmp_path: Path) -> None:
    make_certificates(tmp_path, ["127.0.0.1"], days=30)
    port = free_port()
    credentials = CredentialFolder(tmp_path / "learner")
    examination = Examination("127.0.0.1", port, credentials=credentials)
    command = [spread, f"127.0.0.1:{port}", "--envs", "8"]
    command += ["--security", str(tmp_path / "environment")]
    assert untested(asyncio.run(examination.run(command))) == {"aborted"}


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(900)
def test_cpp_server_keeps_the_contract_if_environments_fail(build: Build) -> None:
    port = free_port()
    command = [build(BREAKING), f"127.0.0.1:{port}", "--envs", "8"]
    found = asyncio.run(Examination("127.0.0.1", port).run(command))
    assert untested(found) == {"credentials"}


@pytest.mark.long
@pytest.mark.system
def test_cpp_server_plays_the_episodes_of_murmurs_own(spread: str, tmp_path: Path) -> None:
    n, steps = 8, 120

    async def compare() -> None:
        came: asyncio.Future[Session] = asyncio.get_running_loop().create_future()

        def door(session: Session) -> Status | None:
            came.set_result(session)
            return None

        async with Peer("127.0.0.1", 0, door, None) as peer:
            command = [spread, f"127.0.0.1:{peer.port}", "--envs", str(n), "--sessions", "1"]
            with running(command, tmp_path / "log"):
                session = await asyncio.wait_for(came, 60)
                await play(session)
                session.end(None)

    async def play(session: Session) -> None:
        assert not session.problem
        spec = spec_from_proto(session.hello.spec)
        own = make(Config(), n)
        assert spec == own.spec
        answer = welcome(n)
        sent = pb.LearnerMessage.FromString(answer).welcome
        slots, episodes = sent.first_slot + np.arange(n), np.zeros(n, np.int64)
        await session.write(answer)
        play = Play(RowRules(spec, n, Checklist(), fresh=True), session, 60)
        random, action = np.random.default_rng(0), np.zeros((n, 3), np.int32)
        restart = np.ones(n, np.bool_)
        for _ in range(steps):
            row = await play.row()
            expected = own.step(action, restart, episode_seeds(sent.run_seed, slots, episodes))
            same(row.step_type, expected.step_type)
            same(row.reward, expected.reward)
            same(row.observation["observation"], expected.observation["observation"])
            restart = row.step_type == StepType.LAST
            for name in spec.metrics:  # they count at an episode's end
                same(row.metrics[name][restart], expected.metrics[name][restart])
            episodes += restart
            action = legal_action(spec, row, random)
            await play.answer(action)

    asyncio.run(compare())


def same(a: Array, b: Array) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


SPREAD = """
environment: {name: spread}
algorithm: {name: mappo}
network: {name: mlp, hidden: [64, 64]}
learner: {port: 0, metrics_port: 0, log_every_s: 1}
evaluation: {every_updates: 20, episodes: 20}
run: {seed: 1, max_env_steps: 100000}
"""


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_run_learns_from_servers_in_cpp_alone(spread: str, tmp_path: Path) -> None:
    """They train and evaluate; -75 is random play, -57 what MAPPO makes of 120,000 steps."""
    config, run = tmp_path / "spread.yaml", RunFolder(tmp_path / "run")
    config.write_text(SPREAD)
    murmur = [sys.executable, "-m", "murmur", "learner", str(config), "--run", str(run.path)]
    with running(murmur, tmp_path / "log") as learner:
        wait_until(lambda: run.process("learner.json"), (tmp_path / "log").read_text)
        port = json.loads((run.path / "learner.json").read_text())["port"]
        with (
            running([spread, f"127.0.0.1:{port}"], tmp_path / "train"),
            running([spread, f"127.0.0.1:{port}", "--evaluate", "20"], tmp_path / "evaluate"),
        ):
            assert learner.wait(600) == 0, (tmp_path / "log").read_text()
    lines = map(json.loads, (run.path / "progress.jsonl").read_text().splitlines())
    means = [x["metrics"]["return"]["mean"] for x in lines if x["kind"] == "evaluation"]
    assert means[-1] > -65, means
