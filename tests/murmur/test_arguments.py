"""A factory is given what the configuration says, whichever way it goes there."""

import base64
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from murmur.doctor.machine import ROOT
from murmur.shared.config.text import difference, one_line
from tests.fuzz import Reader
from tests.fuzz.arguments import REFUSED, document, one
from tests.murmur.spying import seen

DOCUMENTS = int(os.environ.get("MURMUR_DOCUMENTS", "200"))  # through each way
FACTORY = "tests.murmur.spying:Spy"
SECTIONS: dict[str, Any] = {
    "algorithm": {"name": "ppo"},
    "env_server": {"num_workers": 1, "envs_per_worker": 2, "metrics_port": 0},
    "run": {"max_updates": 1},
    "evaluation": {"every_updates": 1, "episodes": 1},
    "learner": {"port": 0, "metrics_port": 0},
}


@given(st.binary(max_size=80))
@settings(
    max_examples=400,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_any_document_arrives_or_is_refused(data: bytes) -> None:
    one(data)


def drawn(number: int, seed: int = 1) -> tuple[str, dict[str, Any]]:
    """Random documents that YAML can say, as keywords of a factory: their text and values."""
    rng = random.Random(seed)  # noqa: S311 - no secrets
    texts: list[str] = []
    values: dict[str, Any] = {}
    while len(values) < number:
        text, value = document(Reader(rng.randbytes(40)))
        if value is not REFUSED:
            text = text.replace("&a ", f"&a{len(values)} ").replace("*a", f"*a{len(values)}")
            texts.append(f"d{len(values)}: {text}")
            values[f"d{len(values)}"] = value
    return "{" + ", ".join(texts) + "}", values


class Ways:
    """Runs commands in a folder; tells what the factory was given."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.file = folder, folder / "spy"
        self.text, self.values = drawn(number)
        environment = f"{{name: gymnasium, factory: '{FACTORY}', arguments: {self.text}}}"
        rest = {key: value for key, value in SECTIONS.items()}
        self.config = folder / "spy.yaml"
        lines = [f"{key}: {one_line(value)}" for key, value in rest.items()]
        self.config.write_text("\n".join([f"environment: {environment}", *lines]) + "\n")
        (folder / "plain.yaml").write_text(
            "\n".join([f"environment: {{name: gymnasium, factory: '{FACTORY}'}}", *lines]) + "\n"
        )

    def run(self, *command: str, **variables: str) -> None:
        """Run a command; the factory must have been given the values, every time."""
        variables |= {"SPY_FILE": str(self.file), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        found = seen(self.file)
        assert found, "no environment was made"
        for arguments in found:
            arguments.pop("render_mode", None)  # `murmur render` gives it
            assert difference(self.values, arguments) is None

    def murmur(self, *arguments: str, **variables: str) -> None:
        """Run `murmur`."""
        self.run(sys.executable, "-P", "-m", "murmur", *arguments, **variables)


@pytest.mark.system
def test_check_env_is_given_what_is_written(tmp_path: Path) -> None:
    ways = Ways(tmp_path, 20)
    ways.murmur("check-env", FACTORY, "--set", f"arguments={ways.text}")


_API = """
import murmur, pickle, base64, sys
values = pickle.loads(base64.b64decode(sys.argv[1]))
sections = pickle.loads(base64.b64decode(sys.argv[2]))
config = {**sections, "environment": {"name": "gymnasium", "factory": FACTORY, "arguments": values}}
murmur.make_env(config)
murmur.make_env(murmur.config(config))
murmur.make_env("spy.yaml")
murmur.make_env(FACTORY, overrides={"arguments": values})
murmur.make_env("plain.yaml", overrides={"environment": {"arguments": values}})
murmur.train(config, run="api", progress=False)
run = murmur.Run("api")
murmur.make_env(run.config)
murmur.make_env(murmur.load("api").config)
"""


def by_baselines(ways: Ways) -> None:
    """Commands that need no run; a variable as containers have it."""
    evaluate = ("evaluate", "--baseline", "random", "--episodes", "2", "--config")
    ways.murmur("check-env", FACTORY, "--set", f"arguments={ways.text}")
    ways.murmur(*evaluate, "spy.yaml")
    ways.murmur(*evaluate, "plain.yaml", MURMUR__ENVIRONMENT__ARGUMENTS=ways.text)


def by_a_run(ways: Ways) -> None:
    """A file, and what uses the run."""
    ways.murmur("train", "spy.yaml", "--run", "run")
    ways.murmur("evaluate", "run", "--episodes", "2")
    ways.murmur("render", "run", "--out", "run.gif")
    ways.murmur("train", "--resume", "--run", "run", "--set", "run.max_updates=2")


def by_items_and_variables(ways: Ways) -> None:
    """Changes of a file without arguments."""
    train = ("train", "plain.yaml", "--run")
    ways.murmur(*train, "set", "--set", f"environment.arguments={ways.text}")
    ways.murmur(*train, "variable", MURMUR__ENVIRONMENT__ARGUMENTS=ways.text)


def by_sweeps(ways: Ways) -> None:
    """The keys `set` and `vary` of sweep files."""
    for key, value in (("set", ways.text), ("vary", f"[{ways.text}]")):
        (ways.folder / f"{key}.yaml").write_text(
            f"configs: [plain.yaml]\n{key}: {{environment.arguments: {value}}}\nparallel: 1\n"
        )
        ways.murmur("sweep", f"{key}.yaml", "--folder", key)


def by_python(ways: Ways) -> None:
    """The Python API."""
    packed = [base64.b64encode(pickle.dumps(x)).decode() for x in (ways.values, SECTIONS)]
    ways.run(sys.executable, "-c", _API.replace("FACTORY", repr(FACTORY)), *packed)


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "way", [by_python, by_sweeps, by_items_and_variables, by_a_run, by_baselines]
)
def test_every_way_gives_the_factory_what_is_written(
    way: Callable[[Ways], None], tmp_path: Path
) -> None:
    way(Ways(tmp_path, DOCUMENTS))
