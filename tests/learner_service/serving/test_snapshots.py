"""Two snapshots: acting does not wait for a publication, and sees each of them whole."""

import threading

import pytest
import torch

from murmur.learner_service.serving.snapshots import Snapshots
from tests.learner_service.toys import CPU, make_coma, vector_spec


def snapshots() -> Snapshots:
    coma = make_coma(vector_spec(num_agents=2))
    return Snapshots(coma.make_policy, 3, CPU)


def test_publication_is_acted_with_from_the_next_act_on() -> None:
    both = snapshots()
    first = both.policy
    with both.acting() as before:
        assert (before.policy, before.version) == (first, 3)
        written = []
        both.publish(written.append, 4)  # does not wait for the act: it writes the other one
        assert written != [first]
        assert (before.policy, before.version) == (first, 3)
    with both.acting() as after:
        assert (after.policy, after.version) == (written[0], 4)
    both.publish(written.append, 5)
    assert written[1] is first


def test_publishing_twice_waits_for_the_act_between() -> None:
    both, written = snapshots(), threading.Event()

    def publish() -> None:
        both.publish(lambda _: None, 4)
        both.publish(lambda _: written.set(), 5)

    publisher = threading.Thread(target=publish)
    with both.acting() as snapshot:
        publisher.start()
        assert not written.wait(0.05)
        assert snapshot.version == 3
    publisher.join(10)
    assert written.is_set()


def test_no_act_waits_while_the_spare_one_is_written() -> None:
    both, writing, go_on = snapshots(), threading.Event(), threading.Event()

    def write(_: object) -> None:
        writing.set()
        assert go_on.wait(10)

    publisher = threading.Thread(target=both.publish, args=(write, 4))
    publisher.start()
    assert writing.wait(10)
    with both.acting() as snapshot:
        assert snapshot.version == 3
    go_on.set()
    publisher.join(10)
    with both.acting() as snapshot:
        assert snapshot.version == 4


def test_an_act_sees_one_publication_only() -> None:
    both, over = snapshots(), threading.Event()

    def write(policy: object) -> None:
        for parameter in policy.actor.parameters():  # type: ignore[attr-defined]
            parameter.add_(1)

    def publish() -> None:
        for version in range(4, 400):
            both.publish(write, version)
        over.set()

    publisher = threading.Thread(target=publish)
    publisher.start()
    versions = []
    while not over.is_set():
        with both.acting() as snapshot:
            weights = [p.detach().clone() for p in snapshot.policy.actor.parameters()]  # type: ignore[attr-defined]
            versions.append(snapshot.version)
            again = list(snapshot.policy.actor.parameters())  # type: ignore[attr-defined]
            assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
            assert snapshot.version == versions[-1]
    publisher.join(10)
    assert versions == sorted(versions)


def test_a_failed_act_gives_its_snapshot_back() -> None:
    both = snapshots()
    with pytest.raises(ZeroDivisionError), both.acting():
        raise ZeroDivisionError
    both.publish(lambda _: None, 4)
    both.publish(lambda _: None, 5)  # would wait for ever
    assert both._current.version == 5
