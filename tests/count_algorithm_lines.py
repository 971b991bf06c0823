"""Counts which lines of the algorithms' files are algorithm and which are plumbing.

    python -m tests.count_algorithm_lines [ROOT]

prints a row for each file of FILES in the checkout ROOT, by default this one. Only code lines
count: no blank lines, comments or docstrings.

Algorithm are the functions that an update or an act runs: those named in ENTRIES, and the functions
of the same file that they use, directly or through others. That is losses, targets, update steps,
exploration and acting. All else is plumbing, by the first kind that fits:

    imports   import statements
    options   classes called Config
    checks    functions that raise an error, and assert statements
    metrics   functions named in METRICS, and dictionaries that functions other than `act` return
    building  the rest: constructors, hooks that make networks, what is published and restored,
              class headers, fields and constants of the module

The last column, which `share_of_algorithm` gives, leaves imports out of the total: they say which
parts a file has from others, and a formatter decides how many lines one takes.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FILES = ("coma", "mappo", "maddpg", "masac", "qmix", "segmentation")
FOLDER = Path("learner_service/algorithms")
# What the learner and the inference thread call, steps that are captured, and hooks of `update`.
ENTRIES = {
    *(
        "update",
        "_learn",
        "act",
        "distribution",
        "in_bounds",
        "sample",
        "mode",
        "forward",
        "_explores",
        "_turn",
    ),
    *("_fit", "_improve", "_steps", "_choose_block"),
    *("_values_of_rows", "_learnable", "_completed"),
}
METRICS = {"_means", "_note", "_note_actor", "evaluate", "confusion", "_count"}
KINDS = ("algorithm", "imports", "options", "checks", "metrics", "building")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines with code on them, from 1."""
    prose = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*prose, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            lines -= span(node.body[0])
    return lines


def span(node: ast.stmt) -> set[int]:
    """Numbers of a statement's lines, decorators included."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return set(range(first, (node.end_lineno or first) + 1))


def functions(tree: ast.Module) -> Iterator[Function]:
    """Functions of the module and methods of its classes, not those of options."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.ClassDef) and node.name != "Config":
            yield from (part for part in node.body if isinstance(part, Function))


def names_used(function: Function) -> set[str]:
    """Names and attributes that a function's body mentions."""
    found = set()
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
    return found


def reached(found: list[Function]) -> set[str]:
    """Names of the functions that the entries run."""
    uses = {}
    for function in found:
        uses.setdefault(function.name, set()).update(names_used(function))
    names, new = set(), ENTRIES & uses.keys()
    while new:
        names |= new
        new = {used for name in new for used in uses[name]} & uses.keys() - names
    return names - METRICS


def kinds(source: str) -> Counter[str]:
    """Code lines of each kind of KINDS."""
    tree = ast.parse(source)
    lines, kind = code_lines(source, tree), {}

    def mark(node: ast.stmt, name: str) -> None:
        kind.update(dict.fromkeys(span(node), name))

    found = list(functions(tree))
    run = reached(found)
    for function in found:
        body = [node for statement in function.body for node in ast.walk(statement)]
        if any(isinstance(node, ast.Raise) for node in body):
            mark(function, "checks")
        elif function.name in METRICS:
            mark(function, "metrics")
        elif function.name in run:
            mark(function, "algorithm")
            for node in body:
                if isinstance(node, ast.Assert):
                    mark(node, "checks")
                logs = isinstance(node, ast.Return) and isinstance(node.value, ast.Dict)
                if logs and function.name != "act":
                    mark(node, "metrics")
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            mark(node, "imports")
        elif isinstance(node, ast.ClassDef) and node.name == "Config":
            mark(node, "options")
    return Counter(kind.get(line, "building") for line in lines)


def share_of_algorithm(counts: Counter[str]) -> float:
    """Algorithm among the lines that are no imports."""
    return counts["algorithm"] / (counts.total() - counts["imports"])


def main(root: Path) -> None:
    """Print the table."""
    total: Counter[str] = Counter()
    print("file".ljust(14), *(name.rjust(9) for name in (*KINDS, "all", "share", "no import")))
    for name in (*FILES, "all"):
        path = root / FOLDER / f"{name}.py"
        if name != "all" and not path.exists():  # an older checkout
            continue
        counts = total if name == "all" else kinds(path.read_text(encoding="utf-8"))
        total.update(counts if name != "all" else {})
        lines, algorithm = counts.total(), counts["algorithm"]
        shares = algorithm / lines, share_of_algorithm(counts)
        row = [*(str(counts[kind]) for kind in KINDS), str(lines), *(f"{x:.0%}" for x in shares)]
        print(name.ljust(14), *(cell.rjust(9) for cell in row))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
