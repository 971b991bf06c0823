"""Specs: checks, protobuf and back, and the first difference."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from murmur.shared.process.errors import SpecError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.spec import (
    EXPERT_ACTION,
    ArraySpec,
    Composite,
    Continuous,
    Discrete,
    EnvSpec,
    action_layout,
    agent_order,
    first_difference,
    spec_from_proto,
    spec_to_proto,
    with_expert,
    without_expert,
)

SPEC = EnvSpec(
    name="e",
    num_agents=3,
    observations=(
        ArraySpec("maps", "uint8", (7, 11, 11)),
        ArraySpec("state", "float32", (9,), per_agent=False),
    ),
    action=Continuous(2, -2.0, 0.5),
    metrics=("return",),
    max_episode_steps=15,
)


NAMED = replace(SPEC, agents=("uav_0", "uav_1", "uav_2"))


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, action=Discrete(5), metrics=()), NAMED])
def test_through_protobuf_and_back(spec: EnvSpec) -> None:
    wire = spec_to_proto(spec).SerializeToString()
    assert spec_from_proto(pb.EnvSpec.FromString(wire)) == spec


def test_equal_specs_have_no_difference() -> None:
    assert first_difference(SPEC, replace(SPEC)) is None


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"name": "f"}, "name: e here, f there"),
        ({"num_agents": 4}, "num_agents: 3 here, 4 there"),
        ({"max_episode_steps": 0}, "max_episode_steps: 15 here, 0 there"),
        ({"metrics": ()}, r"metrics: \('return',\) here, \(\) there"),
        ({"action": Discrete(5)}, r"action: Continuous\(.*\) here, Discrete\(.*\) there"),
        ({"observations": SPEC.observations[:1]}, r"observations: \['maps', 'state'\] here, "),
        (
            {"observations": (ArraySpec("maps", "uint8", (6, 11, 11)), SPEC.observations[1])},
            r"observations\['maps'\]\.shape: \(7, 11, 11\) here, \(6, 11, 11\) there",
        ),
        (
            {"observations": (SPEC.observations[0], ArraySpec("state", "float16", (9,), False))},
            r"observations\['state'\]\.dtype: float32 here, float16 there",
        ),
    ],
)
def test_the_first_difference_is_named(change: dict[str, object], wanted: str) -> None:
    difference = first_difference(SPEC, replace(SPEC, **change))  # type: ignore[arg-type]
    assert difference is not None
    assert re.match(wanted, difference), difference


def of_agents(*agents: str) -> EnvSpec:
    return replace(SPEC, num_agents=len(agents), agents=agents)


@pytest.mark.parametrize(
    ("here", "there", "wanted"),
    [
        ("ab", "ba", "agents: a, b here, b, a there; list the agents in one order in every proces"),
        ("ab", "ac", "agents: a, b here, a, c there; give the agents the same names"),
        (["a" * 256, "b"], ["b", "a" * 256], f"agents: {'a' * 12}...{'a' * 25}, b here, b, aaa"),
        (
            [f"uav_{i}" for i in range(64)],
            [f"uav_{i}" for i in (*range(50), 51, 50, *range(52, 64))],
            "agents: ..., uav_50, uav_51, uav_52, uav_53, uav_54, uav_55, uav_56, uav_57, ... here",
        ),
    ],
)
def test_agents_are_compared_by_name(here: list[str], there: list[str], wanted: str) -> None:
    difference = first_difference(of_agents(*here), of_agents(*there))
    assert difference is not None
    assert difference.startswith(wanted)
    assert len(difference) < 700
    unnamed = replace(of_agents(*here), agents=())
    assert first_difference(of_agents(*there), unnamed) is None
    assert first_difference(unnamed, of_agents(*there)) is None


def test_names_of_metrics_may_come_in_another_order() -> None:
    """Those of teams follow the order of the agents."""
    teams = replace(SPEC, metrics=("return/a", "return/b"))
    assert first_difference(teams, replace(SPEC, metrics=("return/b", "return/a"))) is None


def test_order_of_agents_by_hand() -> None:
    ours, theirs = of_agents("a", "b", "c"), of_agents("c", "a", "b")
    assert agent_order(ours, theirs) == (1, 2, 0)  # a is in row 1 there, b in 2, c in 0
    assert agent_order(theirs, ours) == (2, 0, 1)
    for other in (ours, of_agents("a", "b", "d"), replace(ours, agents=())):
        assert agent_order(ours, other) == ()
        assert agent_order(other, ours) == ()


def test_agents_without_names_are_numbered() -> None:
    assert SPEC.agent_names == ("agent_0", "agent_1", "agent_2")
    assert (SPEC.agent_label(1), NAMED.agent_label(1)) == ("agent 1", "agent 'uav_1'")


IMPOSSIBLE: dict[str, tuple[Callable[[], object], str]] = {
    "agents": (lambda: replace(SPEC, num_agents=0), "has 0 agents"),
    "nothing seen": (lambda: replace(SPEC, observations=()), "declares no observation"),
    "no choice": (lambda: replace(SPEC, action=Discrete(1)), "a choice among 1 actions"),
    "twice": (lambda: replace(SPEC, observations=SPEC.observations * 2), "'maps' twice"),
    "dtype": (lambda: ArraySpec("x", "float64", (1,)), "dtype 'float64'; use one of"),
    "dtype that would break the log": (lambda: ArraySpec("x", "f\r4", ()), r"dtype 'f\\r4'; use"),
    "no size": (lambda: replace(SPEC, action=Continuous(0)), "actions of size 0"),
    "NaN": (lambda: replace(SPEC, action=Continuous(2, float("nan"))), r"in \[nan, 1\]; need"),
    "bounds": (lambda: replace(SPEC, action=Continuous(2, 1.0, 1.0)), r"\[1, 1\]; need"),
    "empty": (lambda: ArraySpec("x", "uint8", (3, 0)), r"empty shape \(3, 0\)"),
    "no action": (lambda: spec_from_proto(pb.EnvSpec(name="e\n")), r"'e\\n' names no action"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_specs_are_refused(name: str) -> None:
    build, wanted = IMPOSSIBLE[name]
    with pytest.raises(SpecError, match=wanted):
        build()


X = ArraySpec("x", "float32", ())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EnvSpec("e", 4097, (X,), Discrete(2)), "4097 agents; at most 4096"),
        (lambda: EnvSpec("e", 1, (X,) * 257, Discrete(2)), "257 observations; at most 256"),
        (lambda: EnvSpec("e", 1, (X,), Discrete(65_537)), "65537 actions; at most 65536"),
        (lambda: EnvSpec("e", 1, (X,), Continuous(65_537)), "65537 actions; at most 65536"),
        (lambda: EnvSpec("e", 1, (X,), Discrete(2), ("m",) * 257), "257 metrics; at most 256"),
        (lambda: EnvSpec("e" * 257, 1, (X,), Discrete(2)), "name of 257 characters"),
        (lambda: EnvSpec("e\nERROR", 1, (X,), Discrete(2)), "all printable"),
        (lambda: EnvSpec("e", 1, (X,), Discrete(2), ("m\x1b[2J",)), "metric .* all printable"),
        (lambda: ArraySpec("x\r", "float32", ()), "observation .* all printable"),
        (lambda: of_agents("a", "a"), "'e' names 2 agents 'a'; each agent needs a name of its own"),
        (lambda: of_agents("a", ""), "agent '' has a name of 0 characters"),
        (lambda: of_agents("a\x1b[2J"), "agent .* all printable"),
        (lambda: of_agents("a" * 257), "name of 257 characters; it may have 1 to 256"),
        (lambda: replace(SPEC, agents=("a", "b")), "has 3 agents and 2 names of agents"),
        (
            lambda: of_agents(*(f"{'a' * 99}{i}" for i in range(4096))),
            "names of agents of 420778 bytes together; at most 262144",
        ),
        (lambda: ArraySpec("x", "float32", (1,) * 9), "9 dimensions; at most 8"),
    ],
)
def test_specs_beyond_the_limits_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        make()


def test_observations_are_found_by_name() -> None:
    assert SPEC.observation("state") is SPEC.observations[1]
    assert SPEC.observation("other") is None


def test_what_a_policy_acts_by_does_not_have_the_expert() -> None:
    view = ArraySpec("view", "float32", (3,))
    expert = ArraySpec(EXPERT_ACTION, "int32", ())
    spec = EnvSpec("toy", 2, (view, expert), Discrete(3))
    assert without_expert(spec).observations == (view,)
    assert without_expert(without_expert(spec)) == without_expert(spec)
    for action in (Discrete(3), Continuous(3), Composite((2, 3)), Composite((2,), (0,), (1,))):
        told = with_expert(EnvSpec("toy", 2, (view,), action))
        assert without_expert(told).observations == (view,)
        dtype, shape = action_layout(action)
        assert told.observations[1] == ArraySpec(EXPERT_ACTION, dtype.name, shape)
    with pytest.raises(SpecError, match=r"reserved for float32 \(3,\)"):
        EnvSpec("toy", 2, (view, expert), Continuous(3))
    with pytest.raises(SpecError, match="reserved for int32"):
        EnvSpec("toy", 2, (view, ArraySpec(EXPERT_ACTION, "float32", ())), Discrete(3))
