"""What `murmur check-env` counts as the time of a step."""

from collections.abc import Callable

import numba
from numba.extending import overload

from murmur.env_service.watchdog.faults import Heartbeat
from murmur.kit.check_env import compilation_shown, patience_s


def test_compilation_counts_as_no_step() -> None:
    heartbeat, seen = Heartbeat.private(1), list[tuple[float, int]]()

    def inner(x: float) -> float:
        return x

    @overload(inner)  # its body runs while numba compiles
    def _(x: float) -> Callable[[float], float]:
        seen.append((patience_s(heartbeat, 1.0), heartbeat.position[2]))

        def compiled(x: float) -> float:
            return x + 1

        return compiled

    part = heartbeat.part(0, 1)
    for _step in range(2):
        part.enter()
        part.leave()
    with compilation_shown(heartbeat):
        outer = numba.njit(lambda x: inner(x))
        part.enter()
        assert patience_s(heartbeat, 1.0) == 1
        assert outer(1.0) == 2
        assert patience_s(heartbeat, 1.0) == 1  # of this step again
        assert outer(1) == 2
    assert [limit for limit, _ in seen] == [600, 600]
    assert len({place for _, place in seen}) == 2  # the watch begins again for each function
    assert heartbeat.position[2] == 0


def test_imports_have_their_own_time() -> None:
    heartbeat = Heartbeat.private(1)
    part = heartbeat.part(0, 1)
    assert patience_s(heartbeat, 1.0) == 120
    assert patience_s(heartbeat, 100.0) == 300
    heartbeat.note_start()
    assert patience_s(heartbeat, 1.0) == 3
    for limit in (3, 3, 1):  # the first two steps may load
        part.enter()
        assert patience_s(heartbeat, 1.0) == limit
        part.leave()
