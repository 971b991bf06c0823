"""The conformance kit: our worker and the example keep the contract, every flaw is named."""

import asyncio
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from examples import environment_server as example
from murmur.doctor.machine import ROOT
from murmur.kit.certs import make_certificates
from murmur.kit.conformance.checklist import Checklist
from murmur.kit.conformance.environments import RowRules
from murmur.kit.conformance.examine import Examination
from murmur.kit.conformance.play import Limits
from murmur.shared.process.errors import ConfigError, ConnectionLostError, ResourceError
from murmur.shared.wire.credentials import CredentialFolder
from murmur.shared.wire.spec import EXPERT_ACTION, ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import StepType, TimeStep
from tests.chaos.stack import free_port
from tests.murmur import wrong_suppliers
from tests.murmur.test_cli import murmur
from tests.murmur.wrong_servers import FLAWS, Aborted

QUICK = Limits(
    start_s=10, patience_s=10, again_s=3, frozen_s=10, delay_s=0.2, quiet_s=4, rows=120, play_s=5
)


def test_experts_name_actions_or_none() -> None:
    expert = ArraySpec(EXPERT_ACTION, "int32", ())
    spec = EnvSpec("corridor", 2, (expert,), Discrete(3))
    for told, words in (
        ([-1, 2], None),
        ([0, 3], "environment 0 returned 3 as expert_action of agent 1"),
    ):
        checklist, zeros = Checklist(), np.zeros((1, 2), np.float32)
        row = TimeStep(
            np.array([StepType.FIRST], np.uint8),
            zeros,
            np.ones(1, np.float32),
            {EXPERT_ACTION: np.array([told], np.int32)},
        )
        RowRules(spec, 1, checklist, fresh=True).examine(row)
        found = checklist.problems.get("rows", [])
        assert (words is None) == (not found)
        assert words is None or words in found[0]


def test_wrong_discounts_name_the_kind_of_row() -> None:
    spec = EnvSpec("corridor", 1, (ArraySpec("cell", "uint8", ()),), Discrete(3))
    checklist, aborted = Checklist(), np.array([StepType.ABORTED], np.uint8)
    reward, discount = np.zeros((1, 1), np.float32), np.zeros(1, np.float32)
    row = TimeStep(aborted, reward, discount, {"cell": np.zeros((1, 1), np.uint8)})
    RowRules(spec, 1, checklist, fresh=True).examine(row)
    assert checklist.problems["discount"] == [
        "row 1: environment 0 has discount 0 on ABORTED, where 1 must be"
    ]


def examined(flaw: type[example.Server], acts: Sequence[str], limits: Limits = QUICK) -> Checklist:
    """Examine a server that runs on a thread of this process."""
    servers: list[example.Server] = []

    def start(port: int) -> None:
        servers.append(flaw(f"127.0.0.1:{port}"))
        servers[0].longest_pause_s = 0.5
        thread.start()

    thread = threading.Thread(target=lambda: servers[0].run())
    try:
        return asyncio.run(Examination("127.0.0.1", 0, limits=limits).run((), acts, start))
    finally:
        servers[0].stop.set()
        thread.join(20)
        assert not thread.is_alive()


# These two wait out a server's pauses.
SLOW = {"takes no refusal", "connects without a pause"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in SLOW)) for name in FLAWS]
)
def test_a_flaw_is_found_and_named(name: str) -> None:
    flaw, key, acts = FLAWS[name]
    limits = QUICK
    if name == "gives up waiting":
        limits = Limits(start_s=10, again_s=1, delay_s=1, patience_s=5)
    problems = examined(flaw, acts, limits).problems
    assert key in problems, problems
    others = problems.keys() - {key}
    # One flaw may break more than one sentence, but never these that have nothing to do with it.
    assert not others & {"credentials", "drain", "answers", "again cut", "again GOAWAY"}, problems


@pytest.mark.long
def test_example_keeps_the_contract_if_environments_fail() -> None:
    checklist = examined(Aborted, [])
    assert checklist.problems == {}
    untested = {key for key, held, _ in checklist.verdicts() if held is None}
    assert untested == {"credentials", "answers", "drain"}  # two of them take a process


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(600)  # twelve processes, one after the other
def test_our_worker_keeps_the_whole_contract(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two sessions of the real environment server, over TLS; exit codes and SIGTERM too."""
    make_certificates(tmp_path, ["127.0.0.1"], days=30)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    port = free_port()
    command = [sys.executable, "-m", "murmur", "env-server", "spread"]
    for item in (
        f"env_server.learner=127.0.0.1:{port}",
        "env_server.metrics_port=0",
        "env_server.envs_per_worker=8",
        f"security.folder={tmp_path / 'environment'}",
    ):
        command += ["--set", item]
    credentials = CredentialFolder(tmp_path / "learner")
    examination = Examination("127.0.0.1", port, credentials=credentials)
    checklist = asyncio.run(examination.run(command))
    assert checklist.problems == {}
    untested = {key for key, held, _ in checklist.verdicts() if held is None}
    assert untested == {"aborted"}


# A connection that nothing passes on any more is noticed after 15 s.
SUPPLY = Limits(start_s=10, patience_s=5, again_s=3, delay_s=0.05, quiet_s=4, play_s=2)


@pytest.mark.parametrize("name", wrong_suppliers.FLAWS)
def test_a_flaw_of_a_supply_server_is_found_and_named(name: str) -> None:
    flaw, key, acts = wrong_suppliers.FLAWS[name]
    problems = examined(flaw, acts, SUPPLY).problems
    assert key in problems, problems
    assert problems.keys() <= {key, "stays", "again UNAVAILABLE"}


@pytest.mark.long
def test_a_supply_server_that_keeps_the_contract_is_found_right() -> None:
    checklist = examined(wrong_suppliers.Supplier, [], SUPPLY)
    assert checklist.problems == {}
    assert checklist.contract.subject == "A supply server"
    untested = {key for key, held, _ in checklist.verdicts() if held is None}
    assert untested == {"credentials", "finite", "answers", "drain"}


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(600)  # sixteen processes, one after the other
def test_our_supply_server_keeps_the_whole_contract(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Over TLS, with samples that travel in parts, and a broken one; exit codes and SIGTERM."""
    make_certificates(tmp_path, ["127.0.0.1"], days=30)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    port = free_port()
    source = '{"name": "tests.supply.toy_source:ToySource", "size": 400, "train": 9, "broken": [5]}'
    command = [sys.executable, "-m", "murmur", "env-server", "faces"]
    for item in (
        f"source={source}",
        f"env_server.learner=127.0.0.1:{port}",
        "env_server.metrics_port=0",
        "env_server.num_workers=1",
        f"security.folder={tmp_path / 'environment'}",
    ):
        command += ["--set", item]
    credentials = CredentialFolder(tmp_path / "learner")
    examination = Examination("127.0.0.1", port, credentials=credentials)
    checklist = asyncio.run(examination.run(command))
    assert checklist.problems == {}
    untested = {key for key, held, _ in checklist.verdicts() if held is None}
    assert untested == {"finite"}


def test_no_server_connects() -> None:
    examination = Examination("127.0.0.1", 0, limits=Limits(start_s=0.2))
    with pytest.raises(ConnectionLostError, match=r"no Hello came within 0\.2 s"):
        asyncio.run(examination.run())


def test_a_server_that_does_not_start_is_quoted() -> None:
    command = [sys.executable, "-c", "print('no such simulator'); raise SystemExit(3)"]
    with pytest.raises(ConnectionLostError, match="has ended: no such simulator"):
        asyncio.run(Examination("127.0.0.1", 0).run(command))
    with pytest.raises(ConfigError, match="cannot start '/no/such/program': No such file"):
        asyncio.run(Examination("127.0.0.1", 0).run(["/no/such/program"]))


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"cannot bind 127\.0\.0\.1:{port}: "):
            asyncio.run(Examination("127.0.0.1", port).run())


def test_the_command_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = murmur(monkeypatch, capsys, "conformance", "50051")
    assert code == 2
    assert "'50051' is no address: write it as host:port" in err
    code, _, err = murmur(monkeypatch, capsys, "conformance", "127.0.0.1:0", "--learner")
    assert code == 2
    assert "--learner` was removed: the kit examines servers" in err
