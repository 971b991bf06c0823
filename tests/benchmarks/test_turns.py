"""Tic-tac-toe's answer, and a policy that finds it by playing both sides."""

import json
from pathlib import Path

import pytest

pytest.importorskip("pygame", reason="PettingZoo's classic games need pygame: the extra classic")
from benchmarks.turns import legal_moves, perfect_moves, play_lines, train, value

pytestmark = pytest.mark.filterwarnings("ignore:The old environment creation API")


def test_perfect_play_draws_and_takes_what_is_given() -> None:
    assert value((0,) * 9, 1) == 0
    # X holds 0 and 1, O 3 and 4: X completes a row, O completes one or blocks and then wins.
    board = (1, 1, 0, 2, 2, 0, 0, 0, 0)
    assert perfect_moves(board, 1) == [2]
    assert perfect_moves(board, 2) == [2, 5]
    # A corner is answered in the center alone.
    assert perfect_moves((1, *(0,) * 8), 2) == [4]
    assert legal_moves(board, 1) == [2, 5, 6, 7, 8]


@pytest.mark.long
def test_tic_tac_toe_is_learned_from_both_sides(tmp_path: Path) -> None:
    policy, _ = train("tictactoe", 1, 0, tmp_path)
    for side in (0, 1):
        found = play_lines(policy, side, perfect_moves)
        assert found["drew"] > 0
        assert found["lost"] == 0
    lines = (tmp_path / "tictactoe-1" / "progress.jsonl").read_text().splitlines()
    last = [r for r in map(json.loads, lines) if r["kind"] == "progress"][-1]
    assert last["agent_steps"] == last["env_steps"]  # a move is one agent's
    assert last["return"] == 0  # of both
    assert set(last["metrics"]) == {"return/player_1", "return/player_2", "length"}
