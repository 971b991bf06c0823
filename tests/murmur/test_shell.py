"""What the shell gets: versions, completion, and plain text where there is no terminal."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from murmur.cli.options import complete_config, complete_environment, complete_run
from murmur.doctor.machine import ROOT, commit
from murmur.shared.config.files import config_names


def murmur(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "murmur", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        timeout=120,
        check=False,
    )


def test_version_names_commit_python_and_torch() -> None:
    result = murmur("--version")
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith("murmur 0.")
    assert commit().removesuffix("-dirty") in first
    assert second.startswith(f"Python {sys.version_info.major}.{sys.version_info.minor}.")
    assert "torch 2." in second


def test_the_shell_completes_commands_and_configurations() -> None:
    def complete(words: str) -> list[str]:
        count = str(len(words.split()) - 1)
        out = murmur(COMP_WORDS=words, COMP_CWORD=count, _MURMUR_COMPLETE="complete_bash")
        return out.stdout.split()

    assert "config" in complete("murmur conf")
    assert complete("murmur train spr") == ["spread", "spread-large"]
    # Typer asks the processes above for the shell: here one is surely a bash.
    words = [sys.executable, "-m", "murmur", "--show-completion"]
    shell = ["bash", "-c", f"{shlex.join(words)}; exit $?"]
    shown = subprocess.run(shell, capture_output=True, text=True, cwd=ROOT, check=False)
    assert "complete -o default" in shown.stdout, shown.stderr


def test_completion_offers_names_then_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "folder").mkdir()
    assert complete_config("") == config_names()
    assert complete_config("mi") == ["mine.yaml"]
    assert complete_config("folder/no/") == []
    assert "terrain" in complete_environment("te")


def test_completion_offers_the_newest_run_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in ((50, "old"), (0, "new")):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "config.yaml").touch()
        os.utime(run / "config.yaml", (time.time() - age, time.time() - age))
    assert complete_run("") == ["runs/new", "runs/old"]
    assert complete_run("runs/o") == ["runs/old"]


def test_a_narrow_dumb_terminal_gets_plain_text() -> None:
    result = murmur("evaluate", "--help", COLUMNS="40", NO_COLOR="1", TERM="dumb")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 40


STOPPED_UNDER_WAY = """
import asyncio
import murmur
import grpc
from grpc import aio

async def wait(request, context):
    await asyncio.sleep(60)

async def main():
    server = aio.server()
    method = grpc.unary_unary_rpc_method_handler(wait)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("a", {"b": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/a/b")(b"")
        await asyncio.sleep(0.05)
        await server.stop(0)
        await asyncio.wait([asyncio.ensure_future(call.code())])

for _ in range(12):
    asyncio.run(main())
"""


def test_grpc_adds_no_lines_of_its_own() -> None:
    # Each time a server stops under a call, which gRPC's core tells about in every second case.
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_UNDER_WAY],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=60,
        check=True,
    )
    assert "goaway" not in done.stderr
