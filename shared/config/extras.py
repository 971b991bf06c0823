"""Optional dependencies: the extra that brings a module, and the command that installs it."""

import contextlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from murmur.shared.process.errors import ConfigError

DISTRIBUTION = "murmur-marl"
_ROOT = Path(__file__).resolve().parents[2]
_MODULES = {  # extra -> modules that it installs
    "learner": "torch kornia tensorboard grpc_health pynvml",
    "env": "PIL numba",
    "zoo": "gymnasium pettingzoo mpe2 lbforaging rware",
    "vmas": "vmas",
    "mujoco": "mujoco gymnasium_robotics",
    "export": "onnx onnxruntime onnxscript safetensors",
    "report": "jinja2 matplotlib imageio pandas",
    "dev": "pytest hypothesis",
    "classic": "pygame",
    "butterfly": "pymunk",
    "box2d": "Box2D",
    "images": "cv2",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "minari": "minari h5py",
}
_EXTRAS = {module: extra for extra, modules in _MODULES.items() for module in modules.split()}


def extra_of(module: str) -> str | None:
    """Return the extra that installs a module; None if it is no optional dependency."""
    return _EXTRAS.get(module.partition(".")[0])


def install_command(extra: str = "") -> str:
    """Return the pip command that installs murmur with an extra, from this murmur's origin.

    Args:
        extra: name of the extra, such as "zoo"; "" for murmur alone.
    """
    suffix = f"[{extra}]" if extra else ""
    folder = _checkout()
    if folder is not None:
        pins = folder / "constraints.txt"
        here = folder.resolve() == Path.cwd()
        parts = ["-c", "constraints.txt" if here else shlex.quote(str(pins))]
        source = f".{suffix}" if here else f"{folder}{suffix}"
        return " ".join([_pip(), "install", *(parts if pins.is_file() else []), f"-e '{source}'"])
    return f"{_pip()} install '{DISTRIBUTION}{suffix}{_source()}'"


def missing_advice(module: str, extra: str) -> str:
    """Return a message that a module is missing, with the command that installs it."""
    package = module.partition(".")[0]
    return f"this needs '{package}', which is not installed: {install_command(extra)}"


@contextlib.contextmanager
def advising(what: str = "") -> Iterator[None]:
    """Replace ModuleNotFoundError by install instructions; a context or a decorator.

    Args:
        what: beginning of the message, such as "source 'faces': ".

    Raises:
        ConfigError: if the missing module is an optional dependency.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if extra is None:
            raise
        raise ConfigError(what + missing_advice(error.name or "", extra)) from None


def _checkout() -> Path | None:
    """Return the folder of the running murmur's source; None if copied into site-packages."""
    origin = _direct_url()
    if origin.get("dir_info", {}).get("editable"):
        folder = _local_path(origin)
        if folder is not None and folder.is_dir():
            return folder
    return _ROOT if (_ROOT / "pyproject.toml").is_file() else None


def _source() -> str:
    """Return the requirement's suffix after the name: " @ URL", or "" for an index package."""
    origin = _direct_url()
    url = str(origin.get("url", ""))
    path = _local_path(origin)
    if path is not None and not path.exists():
        return ""
    if "vcs_info" in origin:
        url = f"{origin['vcs_info'].get('vcs', 'git')}+{url}"
    return f" @ {url}" if url else ""


def _direct_url() -> dict[str, Any]:
    """Return pip's record of a direct URL install (PEP 610); empty if there is none."""
    try:
        data = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError, OSError):
        return {}
    return data if isinstance(data, dict) else {}


def _local_path(origin: dict[str, Any]) -> Path | None:
    url = urlsplit(str(origin.get("url", "")))
    return Path(unquote(url.path)) if url.scheme == "file" else None


def _pip() -> str:
    """Return this Python's pip: `pip` if the shell finds that one, else its path."""
    own = Path(sys.prefix) / "bin" / "pip"
    found = shutil.which("pip")
    if found is not None and Path(found).parent.resolve() == own.parent.resolve():
        return "pip"
    if not own.is_file():
        return f"{shlex.quote(sys.executable)} -m pip"
    near = own.is_relative_to(Path.cwd())
    return shlex.quote(os.path.relpath(own) if near else str(own))
