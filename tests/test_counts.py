"""Counts of the source are what a reader would count by hand."""

import ast
from pathlib import Path

from tests.counts import (
    PACKAGES,
    ROOT,
    File,
    argument_lines,
    circles,
    imports,
    is_fragment,
    many_assigned,
    one_importer,
    read,
    starred_above,
)


def file_of(text: str) -> File:
    return File("a.py", text, ast.parse(text))


def test_circles_and_single_importers_see_functions_imports(tmp_path: Path) -> None:
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from p import b\n")
    (package / "b.py").write_text("def f():\n    from p.c import x\n    return x\n")
    (package / "c.py").write_text("import p.a\nfrom . import d\nx = 1\n")
    (package / "d.py").write_text("")
    graph = imports(read(tmp_path, ("p",)))
    assert [found.text for found in circles(graph)] == ["p/a.py <-> p/b.py <-> p/c.py"]
    assert [found.path for found in one_importer(graph)] == [f"p/{name}.py" for name in "abcd"]


def test_no_files_of_the_packages_import_one_another_in_a_circle() -> None:
    found = circles(imports(read(ROOT, PACKAGES)))
    assert not found, [circle.text for circle in found]


def test_many_attributes_at_once_but_not_one_value_unpacked() -> None:
    text = (
        "self.a, self.b, self.c = x, y, z\n"
        "self.a, self.b, self.c = f()\n"
        "self.a = self.b = self.c = 0\n"
        "self.a, self.b = 1, 2\n"
        "a, b, c = 1, 2, 3\n"
    )
    assert [found.line for found in many_assigned(file_of(text))] == [1, 3]


def test_starred_names_bound_by_the_statement_before() -> None:
    text = "how = 1, 2\nf(*how)\nif x:\n    o = {}\n    y = g(1, **o)\nf(*how)\nz = 1\nf(*how)\n"
    assert [found.line for found in starred_above(file_of(text))] == [2, 5]


def test_argument_lines_and_fragments() -> None:
    text = (
        "Do.\n\nArgs:\n    a: of the policy.\n    b, c: [B, A] rewards of\n        it: none.\n"
        "    d: how many.\n\nReturns:\n    e: no argument.\n"
    )
    found = [*argument_lines(text)]
    assert found == ["of the policy.", "[B, A] rewards of", "how many."]
    assert [is_fragment(part) for part in found] == [True, False, True]
    assert is_fragment("[B] that it is of")
    assert not is_fragment("number of rows")
