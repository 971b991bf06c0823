"""Hook of MkDocs: pages may link to files of the repository that lie outside docs/."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(\]\()((?:\.\./)+)([^)#\s]+)")
_COPY = "repository"  # folder of the site that holds those files


def _outside(source: str, target: str) -> str | None:
    """Path in the repository of a link that leaves docs/; None for one that stays."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), target))
    return None if path.startswith("docs/") else path


def on_config(config: Any) -> Any:  # noqa: ANN401 - MkDocs names no public type
    """Add the decisions to the navigation, in order."""
    pages = sorted((_ROOT / "docs" / "decisions").glob("*.md"))
    config.nav.append({"Decisions": [f"decisions/{page.name}" for page in pages[-1:] + pages[:-1]]})
    return config


def on_files(files: Files, config: Any) -> Files:  # noqa: ANN401 - MkDocs names no public type
    """Add every file outside docs/ that a page links to."""
    wanted: set[str] = set()
    for file in files.documentation_pages():
        for _, up, target in _LINK.findall(Path(str(file.abs_src_path)).read_text()):
            path = _outside(file.src_uri, up + target)
            if path and (_ROOT / path).is_file():
                wanted.add(path)
    for path in sorted(wanted):
        text = (_ROOT / path).read_bytes()
        # A Markdown file is shown as text: its own links lead to places that are not on the site.
        name = f"{_COPY}/{path}.txt" if path.endswith(".md") else f"{_COPY}/{path}"
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:  # noqa: ANN401
    """Turn links to files outside docs/ into links to their copies; to folders, into plain text."""
    source: str = page.file.src_uri
    root = "../" * source.count("/")

    def moved(match: re.Match[str]) -> str:
        path = _outside(source, match[2] + match[3])
        if path is None:
            return match[0]
        suffix = ".txt" if path.endswith(".md") else ""
        return f"{match[1]}{root}{_COPY}/{path}{suffix}"

    return _LINK.sub(moved, markdown)
