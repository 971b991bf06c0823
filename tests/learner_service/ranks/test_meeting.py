"""Ranks that are started again meet apart from what the last ones left in the store."""

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

from murmur.learner_service.ranks.meeting import fresh


@pytest.fixture
def store() -> Store:
    """As torchrun keeps it, beyond the ranks."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                    timeout=timedelta(seconds=30))  # fmt: skip


@pytest.mark.parametrize("early", [0, 1])
def test_a_later_start_sees_nothing_of_an_earlier_one(store: Store, early: int) -> None:
    for start in range(3):
        found: dict[int, Store] = {}

        def meet(rank: int, found: dict[int, Store] = found) -> None:
            if rank != early:
                time.sleep(0.2)
            found[rank] = fresh(store.clone(), rank, 3, 30.0)

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not found[early].check(["address of rank 1"])
        found[1].set("address of rank 1", str(start))
        assert {found[rank].get("address of rank 1") for rank in (0, 2)} == {str(start).encode()}


def test_rank_0_does_not_wait_for_ever(store: Store) -> None:
    store.set("asks/1", "token of a process that is gone")
    with pytest.raises(RuntimeError, match=r"ranks \[1\] do not come"):
        fresh(store, 0, 2, 0.1)
