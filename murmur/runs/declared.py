"""Options and first lines of murmur's plug-ins, read from their source: importing some takes torch.

Of a plug-in's module only the definitions that its Config needs are executed. What these import
from the learner is read the same way; names of libraries that are not imported are stand-ins.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from murmur.shared.config.plugins import KINDS, plugin_names, variant_config

_REAL = {"pydantic", "pydantic_core", "typing_extensions", "numpy", *sys.stdlib_module_names}


class _StandIn:
    """Stand-in for a name of a library that is not imported; good for annotations alone."""

    def __getattr__(self, name: str) -> "_StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: object) -> "_StandIn":
        return self

    def __or__(self, other: object) -> "_StandIn":
        return self

    __ror__ = __or__

    def __call__(self, *given: object, **named: object) -> "_StandIn":
        return self


class ModuleSource:
    """A module's source, of which single definitions are executed.

    Attributes:
        bound: statement that binds each name of the module.
    """

    def __init__(self, module: str, file: Path) -> None:
        """Read `module` from a file."""
        self._file = file
        self._names: dict[str, Any] = {"__name__": module}
        body = ast.parse(file.read_bytes(), str(file)).body
        self.bound = {name: node for node in body for name in _bound_by(node)}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module defines
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._names:
            self._names[name] = _StandIn()  # of a definition that refers to itself
            self._define(name)
        return self._names[name]

    def _define(self, name: str) -> None:
        """Execute the statement that binds a name, after those that it refers to."""
        node = self.bound.get(name)
        if node is None:  # a builtin
            del self._names[name]
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._names[name] = _imported(node, name)
            return
        for used in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & self.bound.keys():
            getattr(self, used)
        exec(compile(ast.Module([node], []), str(self._file), "exec"), self._names)  # noqa: S102 - murmur's own


def _bound_by(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign):
        named = (part for target in node.targets for part in ast.walk(target))
        yield from (part.id for part in named if isinstance(part, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _imported(node: ast.Import | ast.ImportFrom, name: str) -> Any:  # noqa: ANN401
    """Return what an import statement binds to a name."""
    alias = next(a for a in node.names if name in (a.asname, a.name.partition(".")[0]))
    module = node.module if isinstance(node, ast.ImportFrom) else alias.name
    assert module is not None, "murmur's imports are absolute"
    if module.partition(".")[0] in _REAL or module.startswith("murmur.shared"):
        found = import_module(module)
        return getattr(found, alias.name) if isinstance(node, ast.ImportFrom) else found
    if not module.startswith("murmur."):
        return _StandIn()
    inside = f"{module}.{alias.name}"
    return _source(inside) if _file(inside).is_file() else getattr(_source(module), alias.name)


def _file(module: str) -> Path:
    """Return the file of one of murmur's modules."""
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _source(module: str) -> ModuleSource:
    return ModuleSource(module, _file(module))


def declared_model(kind: str, name: str) -> type[BaseModel] | None:
    """Return the options of one of murmur's plug-ins; None if they cannot be known from its source.

    Args:
        kind: key of KINDS.
        name: name of the plug-in.
    """
    folder = KINDS[kind][0]
    variant = getattr(import_module(folder), "VARIANTS", {}).get(name)
    module = f"{folder}.{variant.of if variant else name}"
    if ":" in name or not _file(module).is_file():
        return None
    try:
        model = _source(module).Config
    except Exception:  # the services, which import it, say what is wrong
        return None
    if not isinstance(model, type) or not issubclass(model, BaseModel):
        return None
    return variant_config(variant, model, name) if variant else model


def first_lines(kind: str) -> dict[str, str]:
    """Return the first sentence of every plug-in of a kind, by name; imports none of them."""
    folder, group = KINDS[kind]
    variants = getattr(import_module(folder), "VARIANTS", {})
    found = {}
    for name in plugin_names(kind):
        file = _file(f"{folder}.{name}")
        if name in variants:
            found[name] = variants[name].doc.partition("\n")[0]
        elif file.is_file():
            found[name] = first_line_of(ast.parse(file.read_bytes()))
        else:
            found[name] = _installed_line(group, name)
    return found


def first_line_of(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """Return the sentence at the top of a module, a class or a function."""
    return (ast.get_docstring(node) or "").partition("\n")[0]


def _installed_line(group: str, name: str) -> str:
    """Return the first sentence of a plug-in of an installed package, and the package's name."""
    from importlib.metadata import entry_points

    entry = next(e for e in entry_points(group=group) if e.name == name)
    try:
        spec = find_spec(entry.module)
        tree = ast.parse(Path(spec.origin or "").read_bytes()) if spec else ast.Module([], [])
    except (ImportError, OSError, SyntaxError, ValueError):
        tree = ast.Module([], [])
    named: Any = next((n for n in tree.body if getattr(n, "name", "") == entry.attr), tree)
    package = f"(of {entry.dist.name})" if entry.dist else ""
    return f"{first_line_of(named)} {package}".strip()
