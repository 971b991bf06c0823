"""`murmur new`: a plug-in of your own to begin with, its test and a configuration."""

import keyword
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from murmur.shared.process.errors import ConfigError

Kind = Literal["algorithm", "network", "environment", "source"]
_TEMPLATES = Path(__file__).parent / "templates"
_TEST = '''"""What murmur asks of {article} {kind}, asked of {module}.py."""

from murmur.testing import assert_{kind}


def test_the_contract() -> None:
    assert_{kind}("{module}:{name}")
'''


def write_skeleton(kind: Kind, name: str, folder: Path) -> tuple[list[Path], str]:
    """Write a plug-in that trains as it is.

    Args:
        kind: kind of plug-in.
        name: name of its module; "my-net", "my_net" and "MyNet" are the same.
        folder: folder of the new files.

    Returns:
        The files: plug-in, test, configuration; and what names the class, module:Class.

    Raises:
        ConfigError: if the name cannot be a module's, hides one, or a file is there already.
    """
    module, class_name = _names(name)
    for word in (module, class_name):
        if not word.isidentifier() or keyword.iskeyword(word):
            raise ConfigError(f"'{name}' cannot name a Python module; use letters, digits and _")
    texts = {
        f"{module}.py": (_TEMPLATES / f"{kind}.py").read_text(),
        f"test_{module}.py": _TEST.format(
            article="an" if kind[0] in "ae" else "a", kind=kind, module=module, name=class_name
        ),
        f"{module}.yaml": (_TEMPLATES / f"{kind}.yaml").read_text(),
    }
    files = [folder / file for file in texts]
    there = [file.name for file in files if file.exists()]
    if there:
        raise ConfigError(f"{', '.join(there)} exists already; take another name or folder")
    found = find_spec(module)
    if found is not None and found.origin is not None:
        raise ConfigError(f"module '{module}' ({found.origin}) would hide yours; take another name")
    try:
        for file, text in zip(files, texts.values(), strict=True):
            text = text.replace("Skeleton", class_name).replace("skeleton", module)
            with file.open("x") as new:
                new.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    return files, f"{module}:{class_name}"


def _names(name: str) -> tuple[str, str]:
    """Return the names of module and class: my_net and MyNet."""
    spaced = "".join(f"_{c.lower()}" if c.isupper() else c for c in name.replace("-", "_"))
    words = [word for word in spaced.split("_") if word]
    return "_".join(words), "".join(word.capitalize() for word in words)
