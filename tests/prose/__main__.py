"""Checks names, comments, docstrings, messages and documents by tests/prose/rules.toml.

`make lint` runs it. It prints one line a finding and ends with 1 if there is one.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RULES: dict[str, Any] = tomllib.loads((Path(__file__).parent / "rules.toml").read_text())
Text = tuple[int, str]


@cache
def compiled(kind: str) -> list[tuple[re.Pattern[str], str]]:
    whole = r"(?<![\w-])(?:{})(?![\w-])"
    return [(re.compile(whole.format(old), re.I), new) for old, new in RULES[kind].items()]


def comments(source: str) -> Iterator[Text]:
    """Comments; whole lines of them in succession are one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    block, first, last = "", 0, -1
    for token in (t for t in tokens if t.type == tokenize.COMMENT):
        line, alone = token.start[0], token.line.lstrip().startswith("#")
        if not (alone and line == last + 1):
            yield first, block
            block, first = "", line
        block, last = f"{block}\n{token.string.lstrip('#! ')}", line if alone else -1
    yield first, block


def strings(node: ast.AST) -> Iterator[Text]:
    """Docstrings and all other strings with a space; `{}` stands for what an f-string inserts."""
    if isinstance(node, ast.JoinedStr):
        parts = (str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
        yield node.lineno, "".join(parts)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
        yield node.lineno, node.value
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from strings(child)


def names(tree: ast.AST) -> Iterator[Text]:
    """What the file defines: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(getattr(node, "ctx", ast.Store()), ast.Store):
            named = (getattr(node, field, None) for field in ("name", "arg", "id", "attr"))
            yield from ((node.lineno, name) for name in named if isinstance(name, str))


def paragraphs(source: str) -> Iterator[Text]:
    """Of Markdown, without code blocks; list items and cells of tables stand alone."""
    block = r"(?ms)^ *```.*?^ *```$"
    plain = re.sub(block, lambda match: "\n" * match[0].count("\n"), source)
    starts = [m.end() for m in re.finditer(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.)\s)|\|", plain)]
    for start, end in pairwise([0, *starts, len(plain)]):
        yield plain.count("\n", 0, start) + 1, plain[start:end]


def in_prose(text: str) -> Iterator[str]:
    """Findings in one text; code between backquotes is not prose."""
    text = re.sub(r"`[^`]*`", "code", text)
    line = " ".join(text.split())
    for pattern, new in compiled("prose"):
        for match in pattern.finditer(line):
            yield f'"{match[0]}": write {new}'
    limit = RULES["limits"]["words_per_sentence"]
    # A sentence ends also where a paragraph does, and before and after a line in columns.
    for sentence in re.split(r"(?<=[a-z0-9)`\"][.!?:;])\s|\n\s*\n|\n(?=.*\S {2,}\S)", text):
        words = sum(any(c.isalpha() for c in word) for word in sentence.split())
        if words > limit:
            yield f"sentence of {words} words: at most {limit}; split {sentence.strip()[:40]!r}"


def in_name(name: str) -> Iterator[str]:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name).lower()
    for pattern, new in compiled("names"):
        if pattern.search(words):
            yield f"`{name}`: name it {new}"
    limit = RULES["limits"]["test_name"]
    if name.startswith("test_") and len(name) > limit:
        yield f"`{name}` has {len(name)} characters: at most {limit}"


def findings(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and message of each finding in the text of a file."""
    texts: Iterable[Text] = enumerate(source.splitlines(), 1)
    if path.endswith(".py"):
        tree = ast.parse(source)
        texts = [*comments(source), *strings(tree)]
        yield from ((line, found) for line, name in names(tree) for found in in_name(name))
    elif path.endswith(".md"):
        parts = source.split("\n## ")  # released sections of the changelog are history
        texts = paragraphs("\n## ".join(parts[:2] if path == "CHANGELOG.md" else parts))
    yield from ((line, found) for line, text in texts for found in in_prose(text))


if __name__ == "__main__":
    command = ["git", "-C", str(ROOT), "ls-files", *RULES["files"]["checked"]]
    count = 0
    for path in subprocess.run(command, stdout=-1, text=True, check=True).stdout.splitlines():
        for line, message in sorted(findings(path, (ROOT / path).read_text())):
            print(f"{path}:{line}: {message}")
            count += 1
    print(f"prose: {count} findings" if count else "prose: clean")
    sys.exit(count > 0)
