"""Plug-ins named as module:Name, in files of the user's."""

import math
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from murmur.shared.config.files import load
from murmur.shared.config.named_plugin import named_plugin, require_module
from murmur.shared.config.plugin_folders import folders_in_use, look_in, plugin_files, refused_code
from murmur.shared.config.plugins import load_plugin, require_plugin
from murmur.shared.config.text import difference, parse_yaml, plain_data, to_yaml
from murmur.shared.process.errors import ConfigError


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the folders and the modules of a test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) is None or name.startswith("own_"):
            del sys.modules[name]


def write(folder: Path, source: str, name: str = "own_net") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(source)
    look_in([str(folder)])
    return folder


WITH_CONFIG = '''
from murmur.shared.config import Section
class Net:
    """Notes what it is called with."""
    STACKED = True
    class Config(Section):
        width: int = 8
    def __init__(self, config, shape, num_outputs, slices):
        self.given = config.width, shape, num_outputs, slices
'''
WITH_PARAMETERS = """
def net(shape, num_outputs, slices, width: int = 8, *, deep: bool = False, other=object()):
    return width, deep, shape, num_outputs, slices
"""


def test_a_class_with_a_config_is_built_with_it(tmp_path: Path) -> None:
    write(tmp_path, WITH_CONFIG)
    module = load_plugin("network", "own_net:Net")
    assert module.build(module.Config(width=3), "shape", 2, (0,)).given == (3, "shape", 2, (0,))
    assert module.STACKED
    assert module.__doc__ == "Notes what it is called with."
    assert load_plugin("network", "own_net:Net") is module


def test_further_parameters_are_the_options(tmp_path: Path) -> None:
    write(tmp_path, WITH_PARAMETERS)
    module = load_plugin("network", "own_net:net")
    assert module.Config().model_dump() == {"width": 8, "deep": False}
    built = module.build(module.Config(width=3, deep=True), "shape", 2, (0,))
    assert built == (3, True, "shape", 2, (0,))
    for wrong in ({"widht": 3}, {"width": "wide"}):
        with pytest.raises(ValidationError):
            module.Config(**wrong)


def test_any_option_goes_to_what_takes_any(tmp_path: Path) -> None:
    write(tmp_path, "def source(path, **more):\n    return path, more\n")
    module = named_plugin("source", "own_net:source")
    assert module.build(module.Config(path="a", size=3)) == ("a", {"size": 3})


WRONG = {
    "nothing:Net": (WITH_CONFIG, r"network 'nothing:Net'.*no package 'nothing'.*looked in: /"),
    "own_net:Nit": (WITH_CONFIG, r"'own_net' has no 'Nit'; did you mean 'Net'\?"),
    "own_net:": (WITH_CONFIG, r"write it as package\.module:Name"),
    "own_net.py:Net": (WITH_CONFIG, r"is a file; write own_net:Net"),
    "own_net:WIDTH": ("WIDTH = 3\n", "it is a int; name a class or a function"),
    "own_net:WIDTHS": ("WIDTHS = [3]\n", "it is a list; name a class or a function"),
    "__main__:Net": ("", "is of a notebook or script, where no other process finds it; move it"),
    "own_net:few": (
        "def few(shape):\n    pass\n",
        r"takes \(shape\); it is called with \(shape, num_outputs, slices\) and then its options",
    ),
    "own_net:More": (
        WITH_CONFIG.replace("slices)", "slices, width)").replace("Net", "More"),
        r"it is called with \(config, shape, num_outputs, slices\)$",
    ),
    "own_net:Odd": (
        "class Odd:\n    Config = dict\n",
        r"derive it from murmur\.shared\.config\.Section",
    ),
    "own_net:Bad": ("\nx = {}['lost']\n", r"raised KeyError: 'lost' \(/.*own_net\.py:2\)"),
    "own_net:Torn": ("\n\nclass Torn(\n", r"raised SyntaxError: .*\(/.*own_net\.py:3\)"),
    "own_net:Gone": ("raise SystemExit(3)\n", r"raised SystemExit: 3 \(/.*own_net\.py:1\)"),
    "own_net:Lib": ("import no_such_library\n", "needs 'no_such_library', which is not installed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_a_plugin_is_refused_by_name(name: str, tmp_path: Path) -> None:
    source, words = WRONG[name]
    write(tmp_path, source)
    with pytest.raises(ConfigError, match=words) as caught:
        load_plugin("network", name)
    assert str(caught.value).startswith(f"network '{name}': ")


def test_a_plugin_is_required_without_importing_it(tmp_path: Path) -> None:
    write(tmp_path, "raise RuntimeError('imported')\n")
    require_plugin("network", "own_net:Net")
    assert "own_net" not in sys.modules
    for name in ("nothing:Net", "own_net:", "__main__:Net"):
        with pytest.raises(ConfigError):
            require_module("network", name)


def test_an_unknown_name_of_a_file_says_how_to_name_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(tmp_path, WITH_CONFIG))
    with pytest.raises(ConfigError, match=r"for a class in /.*own_net\.py write own_net:CLASS"):
        load_plugin("network", "own_net")


def test_what_named_code_imports_by_name_is_found(tmp_path: Path) -> None:
    """As Gymnasium imports the entry point of an environment that the user's module registers."""
    write(tmp_path, "import own_registered_by\n", "own_registers")
    write(tmp_path, "", "own_entry")
    write(
        tmp_path,
        "import importlib\nimportlib.import_module('own_entry')\n",
        "own_registered_by",
    )
    look_in([str(tmp_path)], ["own_registers:Env-v0"])
    import_module("own_registers")
    assert "own_entry" in sys.modules
    look_in([str(tmp_path)])
    assert find_spec("own_entry_of_none") is None


def test_a_file_that_a_library_hides_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, WITH_CONFIG, "json")
    with pytest.raises(
        ConfigError, match=rf"'json' has no 'Net': the file {folder}/json\.py is hi"
    ):
        load_plugin("network", "json:Net")


def configured(folder: Path, network: str, **run: Any) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "own.yaml"
    file.write_text(f"environment: {{name: spread}}\nnetwork: {{name: '{network}'}}\nrun: {run}\n")
    return file


def test_a_configuration_keeps_where_its_plugins_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    file = configured(here, "own_net:Net")
    write(here, WITH_CONFIG)
    there.mkdir()
    monkeypatch.chdir(there)
    config = load(str(file), [], {})
    assert config.run.plugin_folders == (str(here), str(there))
    assert folders_in_use() == [str(here), str(there)]
    assert load_plugin("network", "own_net:Net").STACKED
    # A run's own file lies elsewhere: what it says stays.
    kept = configured(
        tmp_path / "run", "own_net:Net", plugin_folders=list(config.run.plugin_folders)
    )
    assert load(str(kept), [], {}).run.plugin_folders == config.run.plugin_folders
    assert load(str(configured(here, "mlp")), [], {}).run.plugin_folders == ()


def test_a_factory_among_options_keeps_its_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = ["environment.name=gymnasium", "environment.factory=gymnasium:make"]
    assert load("spread", wanted, {}).run.plugin_folders == (str(tmp_path),)
    wanted = ["algorithm.name=mappo", "algorithm.critic_network.name=own_net:Net"]
    assert load("spread", wanted, {}).run.plugin_folders == (str(tmp_path),)


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    load(str(configured(tmp_path / "run", "own_net:Net", plugin_folders=[gone])), [], {})
    with pytest.raises(ConfigError, match=rf"{gone}, which does not exist; .*run\.plugin_folders"):
        load_plugin("network", "own_net:Net")


def test_only_named_modules_and_what_they_import_are_found(tmp_path: Path) -> None:
    write(tmp_path, "import own_helper\n", "own_first")
    write(tmp_path, "", "own_helper")
    before = list(sys.path)
    look_in([str(tmp_path)], ["own_first:Net"])
    assert find_spec("own_helper") is None
    import_module("own_first")
    assert "own_helper" in sys.modules
    assert sys.path == before
    look_in()
    assert find_spec("own_other") is None


def test_checkpoint_runs_only_code_that_a_configuration_names(tmp_path: Path) -> None:
    file = configured(tmp_path, "own_allowed:Net")
    assert "or import own_allowed first" in refused_code("own_allowed:Net")
    load(str(file), [], {})
    assert not refused_code("own_allowed:Net")
    assert refused_code("own_allowed:Net", ["/another/folder"])
    assert refused_code("own_allowed:Other")
    assert not refused_code(f"{__name__}:anything")  # imported, and no library's
    for name in (
        "os:system",
        "subprocess:Popen",
        "yaml:unsafe_load",
        "murmur.shared.process.files:write_output",
    ):
        assert "names it" in refused_code(name)
        assert "import" not in refused_code(name)


UNTYPED = """
class Net:
    def __init__(self, shape, num_outputs, slices, table=None, most: dict = {}, end=float("inf")):
        pass
"""


def test_untyped_options_survive_in_a_file(tmp_path: Path) -> None:
    write(tmp_path, UNTYPED)
    look_in([str(tmp_path)])
    kind = named_plugin("network", "own_net:Net").Config
    text = "{table: {0: .nan, 1: [2024-01-31, a]}, most: {2: !!binary aGk=, 1e-3: -.inf}}"
    options = kind.model_validate(parse_yaml(text, "text"))
    written = parse_yaml(to_yaml(plain_data(options)), "written")
    assert difference(written, {**parse_yaml(text, "text"), "end": math.inf}) is None
    assert difference(plain_data(kind.model_validate(written)), written) is None


def test_files_of_plugins_are_found_without_running_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "alone_here.py").write_text("raise SystemExit('not to be run')\n")
    package = tmp_path / "package_here"
    package.mkdir()
    for name in ("__init__", "part"):
        (package / f"{name}.py").write_text("raise SystemExit('not to be run')\n")
    named = ["alone_here:Own", "package_here:Own", "nowhere:Own"]
    before = plugin_files(named)
    assert {name: Path(x["file"]).name for name, x in before.items()} == {
        "alone_here": "alone_here.py",
        "package_here": "__init__.py",
    }
    assert plugin_files(named) == before
    (package / "part.py").write_text("")
    now = plugin_files(named)
    assert now["alone_here"] == before["alone_here"]
    assert now["package_here"] != before["package_here"]
