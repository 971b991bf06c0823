"""The Dockerfiles and what goes into the images."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = {
    "env": ROOT / "env_service/Dockerfile",
    "learner": ROOT / "learner_service/Dockerfile",
}


def hadolint() -> str:
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if found is None:
        pytest.skip("hadolint is not installed (extra dev)")
    return found


OWN = ROOT / "examples/own-environment/Dockerfile"


@pytest.mark.parametrize("file", [*DOCKERFILES.values(), OWN], ids=lambda f: f.parent.name)
def test_hadolint_finds_nothing(file: Path) -> None:
    result = subprocess.run([hadolint(), str(file)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_image_runs_as_nobody_and_says_what_it_is(name: str) -> None:
    text = DOCKERFILES[name].read_text()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    last = text.rindex("\nFROM ")
    final = text[last:]
    assert re.search(r"^USER 10001:10001$", final, re.M)  # a number: Kubernetes checks it
    assert f"ARG VERSION={version}\n" in final
    for label in ("title", "description", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{label}=" in final
    assert "HEALTHCHECK" in final
    assert 'ENTRYPOINT ["murmur"]' in final
    # the extras that are installed
    assert f"[{name!r}]" in text or f"\nARG EXTRAS={name},images\n" in text
    assert "PIP_CONSTRAINT=/src/constraints.txt" in text


def test_all_stages_share_their_base() -> None:
    texts = [file.read_text() for file in DOCKERFILES.values()]
    (base,) = {name for text in texts for name in re.findall(r"^FROM (\S+)", text, re.M)}
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base)  # no moving tag


def test_the_context_holds_what_a_wheel_needs(tmp_path: Path) -> None:
    """A wheel built from what .dockerignore lets through is the wheel of the repository."""
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    ignore = shutil.ignore_patterns("__pycache__", "*.py[cod]", "Dockerfile", "results")
    for name in allowed:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / "src" / name, ignore=ignore, symlinks=True)
        else:
            (tmp_path / "src").mkdir(exist_ok=True)
            shutil.copy(source, tmp_path / "src" / name)
    shutil.copy(ROOT / ".gitignore", tmp_path / "src")  # which the build reads, too
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=tmp_path / "src",
        check=True,
        capture_output=True,
    )
    (wheel,) = (tmp_path / "dist").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "murmur/configs/terrain-demo.yaml",
        "murmur/env_service/envs/terrain/data/jacksboro_fault_dem.npy",
        "murmur/report.html.j2",
        "murmur/shared/rpc/rollout_pb2.py",
    ):
        assert needed in names
    sources = {
        f"{prefix}{path.relative_to(ROOT)}"
        for prefix, package in (
            ("murmur/", "shared"),
            ("murmur/", "env_service"),
            ("murmur/", "learner_service"),
            ("", "murmur"),
        )
        for path in (ROOT / package).rglob("*.py")
    }
    assert sources <= set(names)
    top = {name.partition("/")[0] for name in names}
    assert top == {"murmur", next(name for name in top if name.endswith(".dist-info"))}


@pytest.mark.parametrize("extras", ["env", "env,images", "env,butterfly", "env,box2d,mujoco"])
def test_extras_of_the_image_include_those_they_name(tmp_path: Path, extras: str) -> None:
    """The Dockerfile's own program: an extra may name further ones of murmur, not PyPI's murmur."""
    text = DOCKERFILES["env"].read_text()
    found = re.search(r'^RUN python -c "(.*?)" > requirements.txt', text, re.M | re.S)
    assert found is not None
    program = found[1].replace("\\\n", "").replace("${EXTRAS}", extras)
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = result.stdout.splitlines()
    assert set(project["dependencies"]) <= set(lines)
    assert not any(line.startswith(project["name"]) for line in lines)
    known = project["optional-dependencies"]
    todo, expected = extras.split(","), set(project["dependencies"])
    while todo:
        for line in known[todo.pop()]:
            if line.startswith(f"{project['name']}["):
                todo += line[len(project["name"]) + 1 : -1].split(",")
            else:
                expected.add(line)
    assert set(lines) == expected
