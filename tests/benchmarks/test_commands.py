"""Commands of benchmarks without options: arguments are parsed before anything is measured."""

import importlib

import pytest

from benchmarks._commands import named_cases

TOPICS = (
    "actions",
    "coordination",
    "not_learning",
    "offline",
    "peers",
    "qplex",
    "systems",
    "team_networks",
    "terrain_range",
)


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("nonesuch", 2)])
def test_arguments_are_parsed(
    topic: str,
    argument: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", [topic, argument])
    module = importlib.import_module(f"benchmarks.{topic}")
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == code
    shown = capsys.readouterr()
    if code:
        assert argument in shown.err
    else:
        assert module.__doc__.strip().splitlines()[0] in shown.out


def test_cases_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ([], ["two"], ["two", "one"]):
        monkeypatch.setattr("sys.argv", ["toy", *arguments])
        assert named_cases("A toy.", {"one": 1, "two": 2}) == arguments
    monkeypatch.setattr("sys.argv", ["toy"])
    assert named_cases("A toy.") == []
