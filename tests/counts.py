"""Counts that say how large the source is and how it reads.

    python -m tests.counts [CHECKOUT] [--list NAME] [--json]

CHECKOUT is another one than this. `--list` shows where the things of one count are, such as
`--list "circles of imports"`. Generated code does not count. Importers are files of the packages,
not tests; imports inside functions count. A circle is a group of files that import one another,
directly or through others of the group.

Docstrings are counted by their shape: whether they begin with a question word, say nothing but "See
...", and whether lines of arguments and attributes are fragments, that is, begin with one of the
words of FRAGMENT instead of a noun.
"""

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.count_algorithm_lines import code_lines
from tests.murmur.test_documents import words

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shared", "env_service", "learner_service", "murmur")
EXPERIMENTS = "murmur/benchmarks"  # no part of the packages' lines
BESIDE = ("proto", "monitoring", "benchmarks", "tests")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
QUESTION = re.compile(r"(what|where|who|whose|which|how)\b", re.I)
SEE = re.compile(r"see [\w.`:, ]+$", re.I)
FRAGMENT = {
    *("of", "that", "which", "who", "whose", "what", "where", "when", "how", "why", "if", "than"),
    *("to", "in", "into", "on", "at", "as", "by", "for", "from", "with", "without", "under"),
    *("over", "after", "before", "between", "beside", "beyond", "up", "see", "is", "are", "was"),
    *("were", "be", "has", "have", "had", "can", "may", "must", "not", "or", "and", "but", "they"),
    *("it", "he", "she"),
}
ARGUMENTS = re.compile(r"^(\s*)(Args|Arguments|Attributes):\s*$")
ARGUMENT = re.compile(r"^(\s*)[*\w`, ]+:\s+(\S.*)$")
MANY = 3  # attributes that one statement assigns


class File(NamedTuple):
    """A source file.

    Attributes:
        path: path from the checkout.
        text: content.
        tree: parsed content.
    """

    path: str
    text: str
    tree: ast.Module


class Found(NamedTuple):
    """Where something was found.

    Attributes:
        path: path from the checkout.
        line: number of the line, 0 for the whole file.
        text: description.
    """

    path: str
    line: int
    text: str


def read(root: Path, packages: tuple[str, ...]) -> list[File]:
    """Read and parse the Python files of packages."""
    found = []
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            if not GENERATED.search(path.name):
                text = path.read_text(encoding="utf-8")
                found.append(File(str(path.relative_to(root)), text, ast.parse(text)))
    return found


def imports(files: list[File]) -> dict[str, set[str]]:
    """Return the files that each file imports, those in functions too.

    A name from a package counts as its module if it is one, else as the package's `__init__`.
    """
    modules = {}
    for file in files:
        parts = Path(file.path).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = modules[f"murmur.{name}"] = file.path  # of a folder that murmur links to
    found: dict[str, set[str]] = {}
    for file in files:
        names = set(_imported(file, modules))
        found[file.path] = {modules[name] for name in names if name in modules} - {file.path}
    return found


def _imported(file: File, modules: Mapping[str, str]) -> Iterator[str]:
    """Yield the dotted names that a file imports."""
    package = list(Path(file.path).parent.parts)
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in modules else base


def one_importer(graph: Mapping[str, set[str]]) -> list[Found]:
    """Return the files that exactly one other file imports."""
    importers = defaultdict(set)
    for path, others in graph.items():
        for other in others:
            importers[other].add(path)
    return [
        Found(path, 0, f"by {min(by)}") for path, by in sorted(importers.items()) if len(by) == 1
    ]


def circles(graph: Mapping[str, set[str]]) -> list[Found]:
    """Return the groups of files that import one another (Tarjan's strong components)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def explore(path: str) -> None:
        order[path] = low[path] = len(order)
        stack.append(path)
        for other in sorted(graph[path]):
            if other not in order:
                explore(other)
                low[path] = min(low[path], low[other])
            elif other in stack:
                low[path] = min(low[path], order[other])
        if low[path] == order[path]:
            at = stack.index(path)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for path in sorted(graph):
        if path not in order:
            explore(path)
    return [Found(group[0], 0, " <-> ".join(group)) for group in sorted(found)]


def many_assigned(file: File) -> Iterator[Found]:
    """Yield statements that assign three attributes or more; unpacking one value is free."""
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Assign):
            continue
        count = 0
        for target in node.targets:
            parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            if len(parts) > 1 and not isinstance(node.value, ast.Tuple | ast.List):
                continue
            count += sum(isinstance(part, ast.Attribute) for part in parts)
        if count >= MANY:
            yield Found(file.path, node.lineno, ast.unparse(node)[:80])


def starred_above(file: File) -> Iterator[Found]:
    """Yield calls f(*name) or f(**name) whose name the statement before binds."""
    for block in _blocks(file.tree):
        for before, node in pairwise(block):
            targets = before.targets if isinstance(before, ast.Assign) else []
            bound = {target.id for target in targets if isinstance(target, ast.Name)}
            for call in (part for part in _expressions(node) if isinstance(part, ast.Call)):
                values = [a.value for a in call.args if isinstance(a, ast.Starred)]
                values += [k.value for k in call.keywords if k.arg is None]
                names = {value.id for value in values if isinstance(value, ast.Name)}
                if names & bound:
                    yield Found(file.path, node.lineno, ast.unparse(call)[:80])


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement that are no statements themselves."""
    for part in ast.iter_child_nodes(node):
        if not isinstance(part, ast.stmt):
            yield part
            yield from _expressions(part)


def docstrings(file: File) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def argument_lines(docstring: str) -> Iterator[str]:
    """Yield the description of each argument and attribute, without its first line's name."""
    inside: int | None = None
    deep: int | None = None
    for line in docstring.splitlines():
        if match := ARGUMENTS.match(line):
            inside, deep = len(match[1]), None
        elif inside is not None and line.strip():
            indent = len(line) - len(line.lstrip())
            if indent <= inside:
                inside = None
                continue
            deep = indent if deep is None else deep
            if indent == deep and (match := ARGUMENT.match(line)):
                yield match[2]


def is_fragment(description: str) -> bool:
    """Return whether an argument's description begins without a noun."""
    plain = re.sub(r"^\[[^\]]*\]\s*(\w*\d+\s*)?[,;:]?\s*", "", description)  # its shape
    word = re.match(r"[A-Za-z]+", plain)
    return word is not None and word[0].lower() in FRAGMENT


def own_line_comments(file: File) -> Iterator[Found]:
    """Yield comments that have a line of their own."""
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            yield Found(file.path, token.start[0], token.string)


def document_words(root: Path) -> int:
    """Count the words of README, CONTRIBUTING and docs/*.md by the rule of their limit."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    return sum(words(page) for page in pages if not page.name.endswith(".zh-CN.md"))


def measure(root: Path) -> tuple[dict[str, Any], dict[str, list[Found]]]:
    """Count everything.

    Returns:
        counts, and where the things counted are, by name.
    """
    files = read(root, PACKAGES)
    code: Counter[str] = Counter()
    for file in [*files, *read(root, BESIDE)]:
        bench = file.path.startswith(EXPERIMENTS)
        name = EXPERIMENTS if bench else file.path.partition("/")[0]
        code[name] += len(code_lines(file.text, file.tree))
    graph = imports(files)
    texts = [(file.path, line, text) for file in files for line, text in docstrings(file)]
    lines = [(path, line, part) for path, line, text in texts for part in argument_lines(text)]

    def each(find: Callable[[File], Iterator[Found]]) -> list[Found]:
        return [found for file in files for found in find(file)]

    places = {
        "files with one importer": one_importer(graph),
        "circles of imports": circles(graph),
        "attributes assigned at once": each(many_assigned),
        "f(*name), bound a line above": each(starred_above),
        "own-line comments": each(own_line_comments),
        "docstrings with a question word": [
            Found(path, line, text.splitlines()[0])
            for path, line, text in texts
            if QUESTION.match(text)
        ],
        "docstrings that only say see": [
            Found(path, line, text.splitlines()[0])
            for path, line, text in texts
            if SEE.match(text.strip().rstrip("."))
        ],
        "argument lines that are fragments": [
            Found(path, line, part) for path, line, part in lines if is_fragment(part)
        ],
    }
    ours = sum(code[package] for package in PACKAGES)
    counts: dict[str, Any] = {
        "lines of code": {
            **{name: code[name] for name in (*PACKAGES, EXPERIMENTS, *BESIDE)},
            "packages": ours,
        },
        "files of the packages": len(files),
        "files that are imported": len({other for others in graph.values() for other in others}),
        **{name: len(found) for name, found in places.items()},
        "docstrings": len(texts),
        "argument lines": len(lines),
        "own-line comments, % of code": _percent(places["own-line comments"], ours),
        "question-word docstrings, %": _percent(
            places["docstrings with a question word"], len(texts)
        ),
        "fragment argument lines, %": _percent(
            places["argument lines that are fragments"], len(lines)
        ),
        "words of documents": document_words(root),
    }
    return counts, places


def _percent(found: list[Found], total: int) -> float:
    return round(100 * len(found) / max(1, total), 2)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--list", metavar="NAME", help="where the things of a count are")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    counts, places = measure(given.root.resolve())
    if given.list is not None:
        if given.list not in places:
            parser.error(f"--list {given.list!r}: unknown; known: {', '.join(places)}")
        for found in places[given.list]:
            print(f"{found.path}:{found.line}: {found.text}")
    elif given.json:
        print(json.dumps(counts, indent=1))
    else:
        for name, value in counts.items():
            rows = value.items() if isinstance(value, dict) else [("", value)]
            for part, number in rows:
                print(f"{name:36} {part:18} {number}")


if __name__ == "__main__":
    main()
