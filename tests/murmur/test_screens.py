"""Whatever comes from outside is printed as it is: metrics, paths, errors, lines of logs."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from murmur.bench import result_tables
from murmur.cli.app import _fail
from murmur.doctor.causes import Finding as Cause
from murmur.doctor.diagnosis import Diagnosis, Remedy
from murmur.doctor.page import show
from murmur.doctor.profile import Operation, Profile
from murmur.doctor.profile import show as show_profile
from murmur.env_service.sessions.evaluation_result import EvaluationResult
from murmur.kit.check import Finding, findings_table
from murmur.runs.evaluation import result_table
from murmur.runs.live_view import LiveView, TrainingView
from murmur.runs.run_folder import RunFolder
from murmur.runs.training import print_end
from murmur.shared.config.experiment import RunConfig
from murmur.shared.config.files import load, save
from murmur.text import plain, print_table

NAMES = ("rate [/s]", "[bold]loud", ":rat:", "[link=http://x]y[/link]", "a\\", "[/]")


def screen(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    made = Console(
        file=out, width=400, force_terminal=terminal, color_system=None, legacy_windows=False
    )
    return made, out


def test_plain_words_have_no_effect_on_a_terminal() -> None:
    console, out = screen()
    console.print(plain("a\x1b[2J\x07b\r:rat: [red]c[/red]\nd\x9b"))
    assert out.getvalue() == "a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b" + (
        "\N{REPLACEMENT CHARACTER}:rat: [red]c[/red]\nd\N{REPLACEMENT CHARACTER}\n"
    )


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_training_shows_any_name_as_it_is(
    name: str, terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LiveView, "line_every_s", 0.0)
    console, out = screen(terminal=terminal)
    record = {"kind": "progress", "seconds": 1, "updates": 1, "metrics": {name: 0.25}, "return": 1}
    evaluations = [
        {"kind": "evaluation", "updates": n, "metrics": {name: {"mean": 0.5}}} for n in (0, 3)
    ]
    with TrainingView(RunConfig(name="run " + name.replace("/", "")), console) as view:
        view.update(record)
        for evaluation in evaluations:
            view.update(evaluation)
        view.say(f"said {name}")
        view.trouble(tmp_path / "[/log]", f"ERROR {name}")
    run = RunFolder(tmp_path / "a [/b]")
    run.path.mkdir(parents=True)
    save(load("spread", [], {}), run.path / "config.yaml")
    run.progress_file.write_text("".join(json.dumps(r) + "\n" for r in [record, *evaluations]))
    print_end(run, 1, console)
    shown = out.getvalue()
    for words in (f"{name} 0.500", f"said {name}", f"[/log]: ERROR {name}", "a [/b]/logs"):
        assert words in shown


@pytest.mark.parametrize("name", NAMES)
def test_results_show_any_name_as_it_is(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console, out = screen()
    values = {"return": np.ones(2), name: np.ones(2)}
    result = EvaluationResult(name, "policy", 1, values, {})
    console.print(result_table(name, result))
    assert out.getvalue().count(name) == 3
    for table in result_tables({name: 1, "s": {name: {name: name}}, "rows": [{name: name}]}, name):
        console.print(table)
    console.print(findings_table([Finding(name, "ok", name)]))
    remedy = Remedy(name, (name,), 2.0, 0.5, "processors")
    show(Diagnosis(1.0, 0.5, (Cause("environments", 1.0),), {}, {}, 1, (remedy,)), console)
    operations = {name: Operation(1, 1.0)}
    show_profile(Profile(1, 1.0, {name: {name: 1.0}}, operations, operations, operations), console)
    assert out.getvalue().count(name) >= 3 + 5 + 2 + 2 + 4
    with pytest.raises(SystemExit):
        _fail(f"wrong: {name}")
    assert f"error: wrong: {name}" in capsys.readouterr().err


def test_a_narrow_screen_leaves_names_of_a_table_whole() -> None:
    """Rounding errors of a zero-sum game need the widest columns."""
    names = ("score_difference", "opponent_score_of_the_first_team")
    values = np.array([-7.9e-7, 8.5e-7])
    result = EvaluationResult("x", "policy", 1, dict.fromkeys(("return", *names), values), {})
    out = io.StringIO()
    print_table(Console(file=out, width=80), result_table("run", result))
    for name in names:
        (line,) = (line for line in out.getvalue().splitlines() if line.startswith(f"{name} "))
        assert line.rstrip().endswith("8.5e-07")
