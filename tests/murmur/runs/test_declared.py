"""Options that are read from a plug-in's source are those of the imported plug-in."""

import subprocess
import sys
from pathlib import Path

import pytest

from murmur.runs.declared import declared_model, first_lines
from murmur.runs.settings import first_line
from murmur.shared.config.files import config_names, load
from murmur.shared.config.plugins import KINDS, load_plugin, plugin_names, resolve_plugin
from murmur.shared.config.section import validate
from murmur.shared.config.text import plain_data

LEARNERS = [(kind, name) for kind in ("algorithm", "network") for name in plugin_names(kind)]


@pytest.mark.parametrize(("kind", "name"), LEARNERS)
def test_declared_options_are_those_of_the_module(kind: str, name: str) -> None:
    declared, imported = declared_model(kind, name), load_plugin(kind, name).Config
    assert declared is not None
    assert declared is not imported
    assert declared.model_json_schema() == imported.model_json_schema()
    checks = [set(m.__pydantic_decorators__.model_validators) for m in (declared, imported)]
    assert checks[0] == checks[1]


def test_every_configuration_resolves_to_the_same_values() -> None:
    for name in config_names():
        config = load(name, [], {})
        for kind in ("algorithm", "network"):
            plugin = getattr(config, kind)
            if plugin.name == "auto":
                continue
            declared = declared_model(kind, plugin.name)
            assert declared is not None
            values = plain_data(validate(declared, plugin.options, kind), kind)
            assert values == plain_data(resolve_plugin(kind, plugin).options, kind), name


def test_first_lines_are_those_of_the_modules() -> None:
    for kind in KINDS:
        lines = first_lines(kind)
        assert list(lines) == plugin_names(kind)
        for name, line in lines.items():
            assert line == first_line(load_plugin(kind, name)), name


def test_a_plug_in_of_ones_own_is_left_to_the_services() -> None:
    assert declared_model("algorithm", "my_module:Mine") is None
    assert declared_model("network", "no-such") is None


def test_listing_and_checking_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom murmur.cli import main\n"
        "for words in ['list', 'config', 'config terrain-demo', 'config --schema',\n"
        "              'train spread --set algorithm.actor_lr=abc', '--help']:\n"
        "    sys.argv = ['murmur', *words.split()]\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        print('code', end.code, file=sys.stderr)\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codes = [line for line in done.stderr.splitlines() if line.startswith("code")]
    assert codes == ["code 0"] * 4 + ["code 2", "code 0"]
    assert "'algorithm.actor_lr' = 'abc': it must be a valid number" in done.stderr
    assert not (tmp_path / "runs").exists()
