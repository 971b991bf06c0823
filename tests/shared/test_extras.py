"""The command that installs an extra, for each way murmur can be installed."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from murmur.doctor.machine import ROOT
from murmur.shared.config import extras
from murmur.shared.config.extras import extra_of, install_command, missing_advice


class Installed:
    """Metadata of a distribution as pip leaves it."""

    def __init__(self, origin: dict[str, object] | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._origin is None else json.dumps(self._origin)


def install(monkeypatch: pytest.MonkeyPatch, origin: dict[str, object] | None, root: Path) -> None:
    """Pretend that pip installed murmur from `origin` and that its code lies in `root`."""
    monkeypatch.setattr(extras, "distribution", lambda name: Installed(origin))
    monkeypatch.setattr(extras, "_ROOT", root)


def test_advice_in_a_checkout_is_pip_install_e(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("zoo").endswith("pip install -c constraints.txt -e '.[zoo]'")
    monkeypatch.chdir(ROOT / "docs")
    assert install_command("zoo").endswith(f"-c {ROOT}/constraints.txt -e '{ROOT}[zoo]'")
    assert install_command().endswith(f"-e '{ROOT}'")


def test_advice_in_site_packages_names_where_it_came_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = tmp_path / "murmur_marl-0.2.0-py3-none-any.whl"
    wheel.touch()
    install(monkeypatch, {"url": wheel.as_uri(), "archive_info": {}}, tmp_path)
    assert install_command("env").endswith(f"pip install 'murmur-marl[env] @ {wheel.as_uri()}'")
    git = {"url": "https://host.example/murmur.git", "vcs_info": {"vcs": "git"}}
    install(monkeypatch, git, tmp_path)
    assert "[env] @ git+https://host.example/murmur.git'" in install_command("env")
    install(monkeypatch, None, tmp_path)  # from an index
    assert install_command("env").endswith("pip install 'murmur-marl[env]'")


def test_advice_names_the_pip_of_this_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    pip = tmp_path / "bin" / "pip"
    pip.touch(mode=0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(pip.parent))
    assert install_command("zoo").startswith("pip install ")
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    assert install_command("zoo").startswith("bin/pip install ")
    pip.unlink()
    assert install_command("zoo").startswith(f"{sys.executable} -m pip install ")


def test_every_optional_module_has_an_extra_of_pyproject() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras._MODULES) <= known["optional-dependencies"].keys()
    assert extra_of("PIL.Image") == "env"
    assert extra_of("my_module") is None
    assert missing_advice("torch.nn", "learner").startswith("this needs 'torch', which is not")
