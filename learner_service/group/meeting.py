"""Where the ranks of one start meet, apart from whatever earlier starts have left there."""

import secrets
import time

from torch.distributed import PrefixStore, Store

_LOOK_EVERY_S = 0.02


def fresh(store: Store, rank: int, size: int, timeout_s: float) -> Store:
    """The part of a store that belongs to this start of the ranks alone.

    torchrun keeps its store when it starts the ranks again, without a prefix for each start. What
    the last ones wrote is still there, such as addresses of processes that are gone, and a rank
    that is early would take them for the new ones. How often ranks were started cannot tell the
    starts apart: it differs from machine to machine.

    So rank 0 draws a name for this start. Every other rank asks for it with a token of its own,
    which no earlier process has used, and waits for the answer to that. Rank 0 answers all tokens,
    old ones too, until every rank has come.

    Args:
        store: that all ranks reach.
        rank: of this process.
        size: number of ranks.
        timeout_s: longest wait of rank 0; the others wait as long as the store's own timeout.

    Raises:
        RuntimeError: if the others do not come in time.
    """
    token = secrets.token_hex(8)
    if rank:
        store.set(f"asks/{rank}", token)
        own = PrefixStore(store.get(f"answers/{token}").decode(), store)
        own.set(f"here/{rank}", "")
        return own
    own = PrefixStore(token, store)
    missing, answered = set(range(1, size)), set[str]()
    deadline = time.monotonic() + timeout_s
    while missing := {other for other in missing if not own.check([f"here/{other}"])}:
        for other in missing:
            if store.check([f"asks/{other}"]):
                asked = store.get(f"asks/{other}").decode()
                if asked not in answered:
                    store.set(f"answers/{asked}", token)
                    answered.add(asked)
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(missing)} do not come")
        time.sleep(_LOOK_EVERY_S)
    return own
