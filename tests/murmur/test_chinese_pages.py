"""The Chinese pages say what their English originals say: commands, figures, names, links."""

import re
from collections import Counter
from pathlib import Path

import pytest

from murmur.doctor.machine import ROOT

CHINESE = [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.zh-CN.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(?:^| )\s*# .*$")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def english(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh-CN.md", ".md"))


def code_blocks(text: str) -> list[tuple[str, list[str]]]:
    """Language and lines of each block, without comments."""
    return [
        (language, [COMMENT.sub("", line).rstrip() for line in code.splitlines()])
        for language, code in BLOCK.findall(text)
    ]


def numbers_of_rows(text: str) -> list[Counter[str]]:
    """Numbers of each table row, in any order: languages order the words of a cell differently."""
    rows = [line for line in BLOCK.sub("", text).splitlines() if line.startswith("|")]
    return [Counter(NUMBER.findall(row)) for row in rows]


def numbers_of_sentences(text: str) -> Counter[str]:
    """Numbers in digits outside blocks and tables; links and code are compared apart."""
    lines = [line for line in BLOCK.sub("", text).splitlines() if not line.startswith("|")]
    return Counter(NUMBER.findall(re.sub(r"\]\([^)]*\)|`[^`]*`", "", "\n".join(lines))))


def code_names(text: str) -> Counter[str]:
    return Counter(re.findall(r"`([^`\n]+)`", BLOCK.sub("", text)))


def targets(text: str) -> Counter[str]:
    """Targets of links and pictures, a page for its translation; but for the other language's."""
    found = re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text))
    return Counter(target.replace(".zh-CN.md", ".md") for target in found)


def headings(text: str) -> list[int]:
    return [len(level) for level in re.findall(r"^(#+) ", BLOCK.sub("", text), re.MULTILINE)]


def test_the_chinese_pages_are_there() -> None:
    assert {page.name for page in CHINESE} == {"README.zh-CN.md", "quickstart.zh-CN.md"}


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_commands_figures_and_links_are_those_in_english(page: Path) -> None:
    chinese, original = page.read_text(), english(page).read_text()
    assert code_blocks(chinese) == code_blocks(original)
    assert numbers_of_rows(chinese) == numbers_of_rows(original)
    assert numbers_of_sentences(chinese) == numbers_of_sentences(original)
    assert code_names(chinese) == code_names(original)
    assert headings(chinese) == headings(original)
    assert targets(chinese) == targets(original)


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_each_page_begins_with_a_link_to_its_other_language(page: Path) -> None:
    for here, there in ((page, english(page)), (english(page), page)):
        top = "\n".join(here.read_text().splitlines()[:5])
        assert f"]({there.name})" in top


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (("murmur train spread", "murmur train"), code_blocks),
        (("| 0.29 |", "| 0.92 |"), numbers_of_rows),
        (("takes 7 minutes", "takes 8 minutes"), numbers_of_sentences),
        (("`runs/`", "`run/`"), code_names),
        (("](docs/plan.md)", "](docs/wire.md)"), targets),
    ],
)
def test_a_difference_is_found(changed: tuple[str, str], found: object) -> None:
    text = "It takes 7 minutes; `runs/`, [plan](docs/plan.md).\n\n| entropy | 0.29 |\n\n"
    text += "```\nmurmur train spread   # a comment\n```\n"
    assert callable(found)
    assert found(text) == found(text.replace("a comment", "注释"))
    assert found(text) != found(text.replace(*changed))
