"""At least five planted faults of each kind are found; correct patterns raise no alarm."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from murmur.learner_service.device.readback import Readback, to_host
from tests.pretend_cuda import Kind, Machine, pretend_cuda

GPU = torch.device("cuda")
Plant = Callable[[Machine], object]


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=GPU)


def captured(body: Callable[[], object]) -> Plant:
    """The body is run while a graph is captured."""

    def plant(_: Machine) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            body()

    return plant


def finds(kind: Kind, plant: Plant) -> None:
    with pretend_cuda() as cuda:
        plant(cuda)
    kinds = {fault.kind for fault in cuda.report.faults}
    assert kinds == {kind}, cuda.report.lines()
    assert all(f.site.file.endswith("test_planted.py") for f in cuda.report.faults)


def add_of_two_devices(_: Machine) -> None:
    on_gpu(3) + torch.ones(3)


def layer_on_the_other_device(_: Machine) -> None:
    nn.Linear(3, 2)(on_gpu(1, 3))


def stack_of_a_host_number(_: Machine) -> None:
    torch.stack([on_gpu(3).sum(), torch.tensor(1.0)])


def generator_of_the_host(_: Machine) -> None:
    on_gpu(3).normal_(generator=torch.Generator())


def gather_by_an_index_of_the_host(_: Machine) -> None:
    on_gpu(3).gather(0, torch.tensor([1]))


@pytest.mark.parametrize(
    "plant",
    [
        add_of_two_devices,
        layer_on_the_other_device,
        stack_of_a_host_number,
        generator_of_the_host,
        gather_by_an_index_of_the_host,
    ],
)
def test_mixed_devices_are_found(plant: Plant) -> None:
    finds(Kind.MIX, plant)


SYNCS: dict[str, Callable[[], object]] = {
    "item": lambda: on_gpu(3).sum().item(),
    "branch": lambda: bool(on_gpu(1) > 0),
    "cpu": lambda: on_gpu(3).cpu(),
    "tolist": lambda: on_gpu(3).tolist(),
    "nonzero": lambda: on_gpu(3).nonzero(),
    "mask": lambda: on_gpu(3)[on_gpu(3) > 0],
    "tuple index": lambda: on_gpu(2, 3)[:, (0, 2)],
    "tensor": lambda: torch.tensor([1, 2], device=GPU),
    "pageable copy": lambda: torch.ones(3).to(GPU),
    "equal": lambda: torch.equal(on_gpu(3), on_gpu(3)),
    "event": lambda: (e := torch.cuda.Event(), e.record(), e.synchronize()),
    "device": lambda: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("body", SYNCS.values(), ids=SYNCS.keys())
def test_synchronisations_are_found(body: Callable[[], object]) -> None:
    finds(Kind.SYNC, lambda _: body())


@pytest.mark.parametrize("body", SYNCS.values(), ids=SYNCS.keys())
def test_synchronisations_in_a_graph_are_found(body: Callable[[], object]) -> None:
    finds(Kind.GRAPH, captured(body))


def draws_unregistered() -> None:
    on_gpu(3).normal_(generator=torch.Generator(GPU))


IN_GRAPH: dict[str, Callable[[], object]] = {
    "pinned memory": lambda: torch.empty(3, pin_memory=True),
    "generator": draws_unregistered,
    "event query": lambda: (e := torch.cuda.Event(), e.query()),
    "pageable copy": lambda: torch.ones(3).to(GPU, non_blocking=True),
    "masked select": lambda: on_gpu(3).masked_select(on_gpu(3) > 0),
}


@pytest.mark.parametrize("body", IN_GRAPH.values(), ids=IN_GRAPH.keys())
def test_what_a_graph_cannot_hold_is_found(body: Callable[[], object]) -> None:
    finds(Kind.GRAPH, captured(body))


def test_an_allowed_function_may_synchronise() -> None:
    def reads() -> None:
        on_gpu(3).sum().item()

    name = reads.__qualname__
    with pretend_cuda({name: "it reads the losses"}) as cuda:
        reads()
        assert sum(cuda.report.syncs.values()) == 1
        assert not cuda.report.faults
        on_gpu(3).sum().item()
    assert [f.kind for f in cuda.report.faults] == [Kind.SYNC]


READS: dict[str, Callable[[torch.Tensor], object]] = {
    **{"tolist": lambda x: x.tolist(), "item": lambda x: x.item(), "cpu": lambda x: x.cpu()},
    **{"bool": lambda x: bool(x), "float": lambda x: float(x)},
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_read_in_the_driver_is_found_beside_one_by_an_event(
    read: Callable[[torch.Tensor], object],
) -> None:
    def reads(*, wrongly: bool) -> None:
        total = on_gpu(3).sum()
        assert Readback(GPU).read(total).tolist() == 3
        assert to_host([total])[0] == 3
        if wrongly:
            read(total)

    name = f"{reads.__qualname__}: Event.synchronize"
    with pretend_cuda({name: "it reads the losses"}) as cuda:
        reads(wrongly=False)
        assert not cuda.report.faults
        reads(wrongly=True)
    assert [f.kind for f in cuda.report.faults] == [Kind.SYNC]


def test_an_event_that_acting_makes_is_found() -> None:
    def act() -> None:
        event = torch.cuda.Event()
        for _ in range(3):
            event.record()

    with pretend_cuda() as cuda:
        thread = threading.Thread(target=act, name="inference")
        thread.start()
        thread.join()
    assert [(f.kind, f.what) for f in cuda.report.faults] == [(Kind.SYNC, "creation of an event")]
    assert cuda.report.faults.total() == 1


# --- races ------------------------------------------------------------------------------


def read_before_it_is_written(_: Machine) -> None:
    side, x = torch.cuda.Stream(), on_gpu(3)
    with torch.cuda.stream(side):
        x + 1


def written_while_it_is_read(_: Machine) -> None:
    side, x = torch.cuda.Stream(), on_gpu(3)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    x.zero_()


def waits_for_an_event_of_before(_: Machine) -> None:
    side, event, x = torch.cuda.Stream(), torch.cuda.Event(), on_gpu(3)
    event.record()
    x.add_(1)
    side.wait_event(event)
    with torch.cuda.stream(side):
        x + 1


def two_threads_and_no_event(_: Machine) -> None:
    x = on_gpu(3)
    torch.cuda.current_stream().record_event()

    def other() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x.add_(1)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()


def replay_beside_its_input(_: Machine) -> None:
    x, graph = on_gpu(3), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x + 1
    x.add_(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.replay()


def result_read_while_it_is_copied(_: Machine) -> None:
    side = torch.cuda.Stream()
    host = torch.ones(3).pin_memory()
    with torch.cuda.stream(side):
        x = host.to(GPU, non_blocking=True)
    x + 1


def read_by_the_host_alone(_: Machine) -> None:
    side, x = torch.cuda.Stream(), on_gpu(3)
    with torch.cuda.stream(side):
        x.to("cpu", non_blocking=True)


def rows_that_overlap(_: Machine) -> None:
    side, rows = torch.cuda.Stream(), torch.zeros(6, 4, device=GPU)
    side.wait_stream(torch.cuda.current_stream())
    rows[2].add_(1)
    with torch.cuda.stream(side):
        rows[:3] * 2


@pytest.mark.parametrize(
    "plant",
    [
        rows_that_overlap,
        read_by_the_host_alone,
        read_before_it_is_written,
        written_while_it_is_read,
        waits_for_an_event_of_before,
        two_threads_and_no_event,
        replay_beside_its_input,
        result_read_while_it_is_copied,
    ],
)
def test_races_between_streams_are_found(plant: Plant) -> None:
    finds(Kind.RACE, plant)


# --- memory that is used again ----------------------------------------------------------


def freed_while_another_stream_reads(_: Machine) -> None:
    side, x = torch.cuda.Stream(), on_gpu(3)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    del x
    on_gpu(3)


def freed_on_the_copying_stream(_: Machine) -> None:
    copies = torch.cuda.Stream()
    with torch.cuda.stream(copies):
        x = torch.ones(3).pin_memory().to(GPU, non_blocking=True)
    torch.cuda.current_stream().wait_stream(copies)
    x + 1
    del x
    with torch.cuda.stream(copies):
        torch.ones(3).pin_memory().to(GPU, non_blocking=True)


def recorded_for_the_wrong_stream(_: Machine) -> None:
    side, x = torch.cuda.Stream(), on_gpu(3)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    x.record_stream(torch.cuda.Stream())
    del x
    on_gpu(3)


def waited_too_early(_: Machine) -> None:
    side, x, main = torch.cuda.Stream(), on_gpu(3), torch.cuda.current_stream()
    side.wait_stream(main)
    main.wait_stream(side)
    with torch.cuda.stream(side):
        x + 1
    del x
    on_gpu(3)


def freed_by_a_thread_that_reads(_: Machine) -> None:
    box = [on_gpu(3)]
    begun = torch.cuda.current_stream().record_event()

    def other() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_event(begun)
            box.pop() + 1

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    on_gpu(3)


@pytest.mark.parametrize(
    "plant",
    [
        freed_while_another_stream_reads,
        freed_on_the_copying_stream,
        recorded_for_the_wrong_stream,
        waited_too_early,
        freed_by_a_thread_that_reads,
    ],
)
def test_memory_used_again_before_an_event_is_found(plant: Plant) -> None:
    finds(Kind.REUSE, plant)


# --- memory that graphs of one pool share -------------------------------------------------

Captures = tuple[torch.cuda.CUDAGraph, torch.Tensor]


def captures(number: int, pool: object = None) -> list[Captures]:
    """Graphs of one pool, each with what it returns: 2 and something that it has thrown away."""
    pool, x, made = pool or torch.cuda.graph_pool_handle(), on_gpu(3), []
    for _ in range(number):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            made.append((graph, (x * 3 - x).abs()))
    return made


def returned_before_another_replay(_: Machine) -> None:
    (first, _), (second, returned) = captures(2)
    second.replay()
    first.replay()
    returned + 1


def kept_by_the_third(_: Machine) -> None:
    made = captures(3)
    for graph, _ in reversed(made):
        graph.replay()
    made[2][1] + 1


def read_by_a_graph_of_another_pool(_: Machine) -> None:
    (first, _), (second, returned) = captures(2)
    reader = torch.cuda.CUDAGraph()
    with torch.cuda.graph(reader):
        returned + 1
    for graph in (second, first, reader):
        graph.replay()


def a_view_of_what_was_returned(_: Machine) -> None:
    (first, _), (second, returned) = captures(2)
    view = returned[1:]
    second.replay()
    first.replay()
    view.sum()


def drawn_in_turns(_: Machine) -> None:
    """The next batch is drawn while the last one is learned from, by two graphs of one pool."""
    batches = captures(2)
    for turn in range(4):
        batches[turn % 2][0].replay()
        batches[1 - turn % 2][1] + 1


@pytest.mark.parametrize(
    "plant",
    [
        returned_before_another_replay,
        kept_by_the_third,
        read_by_a_graph_of_another_pool,
        a_view_of_what_was_returned,
        drawn_in_turns,
    ],
)
def test_what_another_graph_of_the_pool_overwrites_is_found(plant: Plant) -> None:
    finds(Kind.POOL, plant)


def test_what_another_graph_overwrites_is_no_number_any_more() -> None:
    with pretend_cuda() as cuda:
        (first, _), (second, returned) = captures(2)
        second.replay()
        assert returned.tolist() == [2.0] * 3
        first.replay()
        assert returned.min() > 1e38
        second.replay()
        assert returned.tolist() == [2.0] * 3
    assert [f.what for f in cuda.report.of(Kind.POOL)]


def test_two_graphs_of_one_pool_must_not_run_at_once() -> None:
    def plant(_: Machine) -> None:
        (first, _), (second, _) = captures(2)
        first.replay()
        with torch.cuda.stream(torch.cuda.Stream()):
            second.replay()

    finds(Kind.RACE, plant)


# --- the host's memory ------------------------------------------------------------------


def read_before_it_arrived(_: Machine) -> None:
    on_gpu(3).to("cpu", non_blocking=True).tolist()


def numpy_before_it_arrived(_: Machine) -> None:
    on_gpu(3).to("cpu", non_blocking=True).numpy()


def summed_before_it_arrived(_: Machine) -> None:
    on_gpu(3).to("cpu", non_blocking=True).sum()


def written_before_it_left(_: Machine) -> None:
    host = torch.ones(3).pin_memory()
    host.to(GPU, non_blocking=True)
    host.zero_()


def written_by_numpy_before_it_left(_: Machine) -> None:
    host = torch.ones(3, pin_memory=True)
    view = host.numpy()
    kept = on_gpu(3)
    kept.copy_(host, non_blocking=True)
    view[0] = 5


def waited_for_by_another_thread(_: Machine) -> None:
    host, event = on_gpu(3).to("cpu", non_blocking=True), torch.cuda.Event()
    event.record()
    thread = threading.Thread(target=event.query)
    thread.start()
    while thread.is_alive():
        pass
    host.tolist()


@pytest.mark.parametrize(
    "plant",
    [
        read_before_it_arrived,
        numpy_before_it_arrived,
        summed_before_it_arrived,
        written_before_it_left,
        written_by_numpy_before_it_left,
        waited_for_by_another_thread,
    ],
)
def test_host_memory_touched_too_early_is_found(plant: Plant) -> None:
    finds(Kind.HOST, plant)


# --- what is right ----------------------------------------------------------------------


def clean_waits(_: Machine) -> None:
    side, x, main = torch.cuda.Stream(), on_gpu(3), torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x + 1
    main.wait_stream(side)
    y + 1
    del x
    y.record_stream(main)
    del y
    on_gpu(3)


def clean_staging(_: Machine) -> None:
    """Two pinned buffers in turns, each written again once its copy is over."""
    copies, acting = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    buffers = [torch.zeros(3, pin_memory=True) for _ in range(2)]
    views = [buffer.numpy() for buffer in buffers]
    left = [torch.cuda.Event() for _ in range(2)]
    rows = torch.zeros(3, device=GPU)
    copies.wait_stream(torch.cuda.current_stream())
    out = torch.zeros(3, pin_memory=True)
    for turn in range(6):
        half = turn % 2
        assert left[half].query()
        views[half][:] = turn
        with torch.cuda.stream(copies):
            rows.copy_(buffers[half], non_blocking=True)
            left[half].record()
        acting.wait_event(left[half])
        with torch.cuda.stream(acting):
            out.copy_(rows * 2, non_blocking=True)
            done = acting.record_event()
        copies.wait_event(done)
        while not done.query():
            pass
        np.testing.assert_array_equal(out.numpy(), np.full(3, 2.0 * turn))


def clean_threads(_: Machine) -> None:
    """One thread writes a snapshot and records an event, the other waits for it."""
    events: list[torch.cuda.Event] = []
    snapshot = on_gpu(3)
    torch.cuda.current_stream().record_event()
    first = torch.cuda.current_stream().record_event()

    def learner() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_event(first)
            snapshot.mul_(2)
            events.append(torch.cuda.current_stream().record_event())

    thread = threading.Thread(target=learner)
    thread.start()
    thread.join()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_event(events[0])
        snapshot + 1


def clean_capture(_: Machine) -> None:
    generator = torch.Generator(GPU)
    x, graph = on_gpu(3), torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    out = torch.zeros(3, pin_memory=True)
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        y = x + torch.empty_like(x).normal_(generator=generator)
        out.copy_(y, non_blocking=True)
    for _turn in range(3):
        x.add_(1)
        graph.replay()
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            pass
        assert torch.isfinite(torch.from_numpy(out.numpy())).all()


def clean_pools(_: Machine) -> None:
    """Results are read before the next replay, copied out of the pool, or of a pool apart."""
    (first, one), (second, two) = captures(2)
    (third, three), kept = captures(1)[0], on_gpu(3)
    for _turn in range(3):
        third.replay()
        second.replay()
        kept.copy_(two)
        first.replay()
        one + kept + three


def clean_training(_: Machine) -> None:
    net = nn.Linear(4, 2).cuda()
    optimizer = torch.optim.Adam(net.parameters(), fused=True, capturable=True)
    scaler = torch.amp.GradScaler("cuda")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype):
            out = net(torch.randn(3, 4, device=GPU))
        assert out.dtype == dtype
        optimizer.zero_grad()
        scaler.scale(out.float().square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()


def clean_halves(_: Machine) -> None:
    """One half of a pinned buffer is written while the other is copied."""
    buffer, rows = torch.zeros(2, 3, pin_memory=True), torch.zeros(3, device=GPU)
    rows.copy_(buffer[0], non_blocking=True)
    buffer[1].fill_(1)
    rows.copy_(buffer[1], non_blocking=True)
    out = torch.zeros(2, 3, pin_memory=True)
    out[0].copy_(rows, non_blocking=True)
    assert out[1].tolist() == [0.0] * 3


def clean_parts(_: Machine) -> None:
    """One stream reads rows that are complete while another writes the next ones."""
    side, rows = torch.cuda.Stream(), torch.zeros(6, 4, device=GPU)
    for t in range(1, 6):
        rows[t - 1].add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            rows[:t] * 2
    torch.cuda.current_stream().wait_stream(side)
    rows.zero_()


def clean_release(_: Machine) -> None:
    """Memory is freed after another thread has read it, awaited that, and let go of it."""
    box, side = [on_gpu(3)], torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def other() -> None:
        with torch.cuda.stream(side):
            box[0] + 1
        done = side.record_event()
        while not done.query():
            pass

    thread = threading.Thread(target=other)
    thread.start()
    while thread.is_alive():  # join would tell this thread what that one knows
        pass
    box.clear()
    on_gpu(3)


@pytest.mark.parametrize(
    "pattern",
    [
        clean_release,
        clean_waits,
        clean_staging,
        clean_threads,
        clean_capture,
        clean_pools,
        clean_training,
        clean_halves,
        clean_parts,
    ],
)
def test_what_is_right_raises_no_alarm(pattern: Plant) -> None:
    with pretend_cuda({"clean_training": "copies its weights to the device"}) as cuda:
        pattern(cuda)
    assert not cuda.report.lines()


def test_new_memory_after_the_reading_stream_was_awaited_is_fine() -> None:
    with pretend_cuda() as cuda:
        side, x, main = torch.cuda.Stream(), on_gpu(3), torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x + 1
        del x
        main.wait_stream(side)
        on_gpu(3)
    assert not cuda.report.lines()
