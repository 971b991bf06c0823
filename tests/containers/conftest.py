"""A container engine: the one that is there, else one made of Debian packages."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("debian_engine.sh")


def _answers(environment: dict[str, str]) -> bool:
    return all(
        subprocess.run(
            ["docker", *what], env=environment, capture_output=True, check=False
        ).returncode
        == 0
        for what in (["info"], ["compose", "version"])
    )


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables with which `docker compose` works.

    MURMUR_ENGINE_DIR keeps the engine's folder, so that a second run need not build all again.
    """
    environment = dict(os.environ)
    if shutil.which("docker") and _answers(environment):
        yield environment
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        pytest.skip(
            "no container engine answers, and none can be set up: that takes root on Debian"
        )
    kept = os.environ.get("MURMUR_ENGINE_DIR")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("engine")
    try:
        subprocess.run([str(SCRIPT), "start", str(folder)], check=True)
        environment |= {
            "DOCKER_CONFIG": str(folder / "config"),
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_BUILDKIT": "0",  # its plug-in is another package
            "COMPOSE_DOCKER_CLI_BUILD": "0",
        }
        assert _answers(environment), (folder / "dockerd.log").read_text()[-2000:]
        yield environment
    finally:
        subprocess.run([str(SCRIPT), "stop", str(folder)], check=True)
