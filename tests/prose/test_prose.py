"""The checker of names and prose finds what the rules forbid, and only there."""

from tests.prose.__main__ import RULES, findings

CODE = '''"""Makes all anew."""

# Every copy is borne until its
# session goes on, with so many others.


class Tally:  # a plain comment
    """Counts, by `so many` names."""

    def forget(self, seat: int) -> None:
        name = "nobody"
        raise ValueError(f"port {seat} cannot be had")
'''
PAGE = """# Which goes on

| term | nobody |

```
murmur anew
```

Run `anew`. It ends
anew.
"""


def lines(path: str, text: str) -> list[tuple[int, str]]:
    return [(line, message.split(":")[0]) for line, message in findings(path, text)]


def test_python_names_comments_docstrings_and_messages_are_checked() -> None:
    assert sorted(lines("a.py", CODE)) == [
        (1, '"anew"'),
        (3, '"borne"'),
        (3, '"goes on"'),
        (3, '"so many"'),
        (7, "`Tally`"),
        (10, "`forget`"),
        (10, "`seat`"),
        (12, '"cannot be had"'),
    ]


def test_markdown_is_checked_outside_code() -> None:
    assert sorted(lines("a.md", PAGE)) == [(1, '"goes on"'), (3, '"nobody"'), (9, '"anew"')]


def test_released_sections_of_the_changelog_are_history() -> None:
    text = "# Changelog\n\n## Unreleased\n\n- Anew.\n\n## 0.1.0\n\n- Anew.\n"
    assert lines("CHANGELOG.md", text) == [(5, '"Anew"')]


def test_long_sentences_and_names_of_tests_are_found() -> None:
    limit = RULES["limits"]["words_per_sentence"]
    assert lines("a.md", "word " * limit) == []
    assert len(lines("a.md", "A sentence. " + "word " * (limit + 1))) == 1
    assert len(lines("a.py", f"def test_{'x' * RULES['limits']['test_name']}(): ...")) == 1
