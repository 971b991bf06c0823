"""What the documents name is there: pages, commands, their options."""

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import murmur
from murmur.cli import app
from murmur.doctor.machine import ROOT
from murmur.runs.settings import with_plugin_defaults
from murmur.shared.config.files import config_names, load

PAGES = [
    ROOT / f"{name}.md"
    for name in ("README", "README.zh-CN", "CHANGELOG", "CONTRIBUTING", "SECURITY")
]
PAGES += [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]


OF_PAGE = {"league.md": "snakes", "snakes.md": "snakes"}  # what RUN and CONFIG stand for
CHINESE = [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.zh-CN.md"))]
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ENGLISH = [page for page in WRITTEN if page not in CHINESE]
RUNNABLE = [*WRITTEN, CHINESE[0]]  # pages whose commands and code are tried


def words(page: Path) -> int:
    """Words by hand: with a letter, outside code blocks and the table that acceptance writes."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [
        x for x in text.splitlines() if not x.startswith("    ") and not re.match(r"\| A\d", x)
    ]
    return sum(any(c.isalpha() for c in word) for line in lines for word in line.split())


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        to = page.parent / path if path else page
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_has_its_options(page: Path) -> None:
    known: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    text = page.read_text().replace("\\\n", " ")
    starts = r"(?:^ *|\$ +|`)murmur ([a-z-]+)([^`\n]*)"
    for command, rest in re.findall(starts, text, re.MULTILINE):
        if command not in known:  # a sentence that begins with its name
            assert not rest.lstrip().startswith("-"), command
            continue
        options = {o for p in known[command].params for o in (*p.opts, *p.secondary_opts)}
        given = re.findall(r"(?<= )--[a-z-]+", re.split(r" -- |  +#", rest)[0])
        assert set(given) <= options, f"{command} {rest}"


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def configured(page: Path) -> list[tuple[str, list[str]]]:
    """Configuration and --set of every command on the page that names one of murmur's."""
    found = []
    commands = "train|learner|env-server|plan|slurm|sweep|evaluate|render"
    for line in "\n".join(blocks(page, "")).replace("\\\n", " ").splitlines():
        match = re.match(rf"(?:\S+\$ +)?murmur (?:{commands}) (.*)", line.strip())
        given = shlex.split(re.split(r"  +#", match[1])[0]) if match else []
        name = ""
        if given:
            name = given[given.index("--config") + 1] if "--config" in given else given[0]
        if name in ("CONFIG", "RUN"):
            name = OF_PAGE.get(page.name, "spread")
        if name in config_names():
            found.append((name, [b for a, b in pairwise(given) if a == "--set"]))
    return found


@pytest.mark.parametrize("page", [p for p in RUNNABLE if configured(p)], ids=name_of)
def test_settings_of_every_command_are_valid(page: Path) -> None:
    for name, settings in configured(page):
        with_plugin_defaults(load(name, settings, {}))


@pytest.mark.parametrize("page", [p for p in WRITTEN if blocks(p, "yaml")], ids=name_of)
def test_every_yaml_block_is_a_configuration(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "yaml"):
        if "sweep.yaml" in text:
            continue  # tests/murmur/sweeps has its format
        file = tmp_path / "experiment.yaml"
        whole = re.search("^(environment|source|extends):", text, re.MULTILINE)
        file.write_text(text if whole else f"extends: spread\n{text}")
        config = load(str(file), [], {})
        if not re.search(r"name: \"?\w+:\w+", text):  # a plug-in of the page
            with_plugin_defaults(config)


@pytest.mark.parametrize("page", [p for p in RUNNABLE if blocks(p, "python")], ids=name_of)
def test_every_python_block_can_be_parsed(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)


def test_python_page_calls_what_there_is() -> None:
    code = blocks(ROOT / "docs" / "python.md", "python")
    nodes = [node for block in code for node in ast.walk(ast.parse(block))]
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "murmur"
    }
    assert {"train", "load", "config", "make_env", "sweep", "compare"} <= used
    assert used <= set(murmur.__all__)
    for call in nodes:
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("murmur."):
            known = inspect.signature(getattr(murmur, ast.unparse(call.func).partition(".")[2]))
            assert {keyword.arg for keyword in call.keywords} <= set(known.parameters)


@pytest.mark.parametrize("page", ENGLISH, ids=name_of)
def test_page_has_at_most_1200_words(page: Path) -> None:
    assert words(page) <= 1200


def test_documents_do_not_grow_again() -> None:
    assert sum(map(words, ENGLISH)) <= 26_000
    for name in ("README.md", "README.zh-CN.md"):
        assert len((ROOT / name).read_text().splitlines()) <= 120


def test_one_python_is_said_to_be_tested() -> None:
    tested = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    images = re.findall(
        r"^FROM python:(3\.\d+)",
        (ROOT / "learner_service" / "Dockerfile").read_text(),
        re.MULTILINE,
    )
    assert tested == [*dict.fromkeys(images)]
    for page in (ROOT / "README.md", CHINESE[0]):
        assert set(re.findall(r"Python (3\.\d+)", page.read_text())) == set(tested)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_table_has_a_head_and_rows_of_equal_length(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", prose, re.MULTILINE):
        rows = [re.sub(r"`[^`]*`", "", row) for row in table.splitlines()]
        assert len(rows) > 2, table
        assert re.fullmatch(r"[|:\- ]+", rows[1]), table
        cells = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
        assert len(cells) == 1, table


def test_page_of_pages_names_every_page() -> None:
    listed = set(re.findall(r"\]\(([^)#]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "reference").glob("*.md")]
    known = {str(page.relative_to(ROOT / "docs")) for page in pages}
    assert listed == known - {"README.md"} | {"decisions/README.md"}


def test_citation_names_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


@pytest.mark.long
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "quickstart.html").exists()
    assert (tmp_path / "repository" / "SECURITY.md.txt").exists()  # docs/security.md links to it


def test_rooms_and_files_of_the_architecture_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    stations, rooms = page.split("## Decisions")[0], page.split("## Where the code is")[1]
    rooms = rooms.split("## Extending")[0]
    roots = [
        ROOT,
        *(ROOT / name for name in ("shared", "env_service", "learner_service", "murmur")),
    ]
    roots += [path for root in roots[1:] for path in root.iterdir() if path.is_dir()]
    named = re.findall(r"`([a-z_/]+(?:/|\.py))`", stations + rooms)
    assert len(named) > 30
    named.remove("chaos/")
    assert not [name for name in named if not any((root / name).exists() for root in roots)]
