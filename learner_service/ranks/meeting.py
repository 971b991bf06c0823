"""Meeting point of the ranks of one start, apart from what earlier starts have left there."""

import os
import secrets
import socket
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from murmur.learner_service.ranks import MEETING_VARIABLE
from murmur.shared.process.process import logger

_LOOPBACK = "127.0.0.1"
_LOOK_EVERY_S = 0.02


def on_one_machine(size: int) -> bool:
    """Whether all ranks run on this machine, by the variables of their launcher."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(size)


def stay_on_loopback() -> None:
    """Let gloo and NCCL listen on the loopback interface alone, whatever the host's name is.

    By default gloo listens on the address that the host's name resolves to, NCCL on the first
    interface of the machine. Call it before the process joins a group.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for name in names[:1]:
        # NCCL takes a name for the beginning of several, unless it follows "=".
        for variable, value in (("GLOO_SOCKET_IFNAME", name), ("NCCL_SOCKET_IFNAME", f"={name}")):
            before = os.environ.get(variable, value)
            if before not in (name, value):
                logger.warning(
                    "%s=%s is not used: all ranks run on this machine and listen on %s alone",
                    variable,
                    before,
                    name,
                )
            os.environ[variable] = value


def loopback_store(rank: int, timeout: timedelta) -> Store | None:
    """The store of ranks on one machine, kept by rank 0 on 127.0.0.1.

    None under torchrun, which keeps a store of its own.

    Args:
        rank: rank of this process.
        timeout: longest wait for the others.

    Raises:
        RuntimeError: if rank 0 does not come.
        OSError: if its port is in use.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        if rank == 0:
            logger.warning(
                "torchrun's rendezvous listens on all interfaces and unpickles what clients send; "
                "where all ranks run on one machine, start `murmur learner --learners %s`",
                os.environ["WORLD_SIZE"],
            )
        return None
    port = int(os.environ["MASTER_PORT"])
    if rank:
        return TCPStore(_LOOPBACK, port, is_master=False, timeout=timeout)
    handed_down = os.environ.pop(MEETING_VARIABLE, "")
    if handed_down:
        return kept_store(socket.socket(fileno=int(handed_down)), timeout)
    return kept_store(socket.create_server((_LOOPBACK, port)), timeout)


def kept_store(listening: socket.socket, timeout: timedelta) -> TCPStore:
    """A store that this process keeps, at the address of a listening socket, which it takes over.

    Args:
        listening: socket of 127.0.0.1; torch's own socket would listen on all interfaces.
        timeout: longest wait for a key.
    """
    host, port = listening.getsockname()
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


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
        store: store that all ranks reach.
        rank: rank of this process.
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
