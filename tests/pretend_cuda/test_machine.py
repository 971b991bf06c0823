"""The pretended device computes what the CPU does, and its graphs what eager code does."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pretend_cuda import pretend_cuda

GPU = torch.device("cuda")


class Updates:
    """A small network that learns from noise drawn on its device."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        capturable = device.type == "cuda"
        self.optimizer = torch.optim.Adam(
            self.net.parameters(), 1e-2, fused=True, capturable=capturable
        )
        self.generator = torch.Generator(device).manual_seed(1)
        self.rows = torch.zeros(16, 4, device=device)

    def update(self) -> Tensor:
        noise = torch.empty_like(self.rows).normal_(generator=self.generator)
        loss = (self.net(self.rows + noise).squeeze(-1) - noise.sum(1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]


def test_replays_equal_eager_updates_to_the_bit() -> None:
    eager = Updates(torch.device("cpu"))
    losses = [eager.update() for _ in range(12)]
    with pretend_cuda() as cuda:
        captured = Updates(GPU)
        for _ in range(3):
            captured.update()
        before = captured.weights()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(captured.generator)
        with torch.cuda.graph(graph):
            loss = captured.update()
        assert all(map(torch.equal, before, captured.weights()))  # a capture computes nothing
        assert loss > 1e30  # nor has it a result yet
        for i in range(3, 12):
            graph.replay()
            assert torch.equal(loss, losses[i])
    assert all(map(torch.equal, eager.weights(), captured.weights()))
    assert cuda.launches[threading.current_thread().name]["graph replay"] == 9


def test_a_number_of_python_is_frozen_in_a_graph() -> None:
    with pretend_cuda():
        factor, x, graph = 2.0, torch.ones(2, device=GPU), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * factor
        factor = 3.0
        x.add_(1)
        graph.replay()
        assert y.tolist() == [4.0, 4.0]


def test_shapes_changed_in_place_do_not_disturb_a_replay() -> None:
    with pretend_cuda() as cuda:
        x, graph = torch.ones(1, 3, device=GPU), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            y.squeeze_(0)
            z = y + 1
        cuda.launches.clear()
        for _ in range(2):
            x.add_(1)
            graph.replay()
    assert z.tolist() == [7.0] * 3
    assert cuda.launches[threading.current_thread().name] == {"add_": 2, "graph replay": 2}


def test_tensors_say_where_they_are() -> None:
    with pretend_cuda():
        net = nn.Linear(2, 3, device=GPU)
        out = net(torch.zeros(4, 2, device="cuda:0"))
        for x in (out, net.weight, copy.deepcopy(net).weight, out[1:], torch.zeros_like(out)):
            assert x.device == torch.device("cuda", 0)
            assert x.is_cuda
        assert out.cpu().device.type == "cpu"
        assert torch.zeros(3).to(GPU, torch.int32).is_cuda
        assert torch.zeros_like(out, device="cpu").device.type == "cpu"
        assert torch.zeros(2, pin_memory=True).is_pinned()
        with pytest.raises(TypeError, match="cuda"):
            out.detach().numpy()
    assert not torch.cuda.is_available()


def test_launches_are_counted_without_views_and_allocations() -> None:
    with pretend_cuda() as cuda:
        x = torch.empty(4, 4, device=GPU)
        assert not cuda.launches
        x.zero_()
        x.view(-1)[3:].t()
        torch._foreach_add_([x, x[0]], 1.0)
        torch.zeros(3, device=GPU)
    assert cuda.launches[threading.current_thread().name] == {
        "zero_": 1,
        "_foreach_add_": 1,
        "zeros": 1,
    }


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_casts_are_counted_without_autograd(off: Any) -> None:
    """There operations made of others, such as `to` and `linear`, are dispatched whole."""
    with pretend_cuda() as cuda:
        layer, x = nn.Linear(4, 2, device=GPU).requires_grad_(False), torch.zeros(3, 4, device=GPU)
        cuda.launches.clear()
        with off(), torch.autocast("cuda", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
    assert cuda.launches[threading.current_thread().name] == {"_to_copy": 3, "addmm": 1}


def test_hollow_products_are_zero_and_counted_alike() -> None:
    counts = []
    for hollow in (False, True):
        with pretend_cuda(hollow=hollow) as cuda:
            net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2)).to(GPU)
            out = net(torch.ones(4, 2, 3, 3, device=GPU))
            out.square().sum().backward()
            counts.append(dict(cuda.launches[threading.current_thread().name]))
            assert bool((out == 0).all()) == hollow
    assert counts[0] == counts[1]


@pytest.mark.parametrize("hollow", [False, True])
def test_replays_count_the_operations_of_their_graph(hollow: bool) -> None:
    """A hollow device computes nothing in a replay."""
    with pretend_cuda(hollow=hollow) as cuda:
        x = torch.zeros(3, device=GPU)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x + 1).mul_(2)
        for _ in range(4):
            graph.replay()
        me = threading.current_thread().name
        assert cuda.launches[me]["graph replay"] == 4
        assert cuda.replayed[me] == {"nodes": 8, "kernels": 8}
        assert y.tolist() == [0.0 if hollow else 2.0] * 3


def test_each_thread_has_a_current_stream() -> None:
    seen = []
    with pretend_cuda():
        side = torch.cuda.Stream(priority=-1)
        with torch.cuda.stream(side):
            thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
            thread.start()
            thread.join()
            assert torch.cuda.current_stream() == side
        assert seen == [torch.cuda.default_stream()]
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_events_measure_time_once_they_are_awaited() -> None:
    with pretend_cuda({"test_events_measure_time_once_they_are_awaited": "waits"}) as cuda:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        torch.ones(3, device=GPU)
        ended.record()
        ended.synchronize()
        assert begun.elapsed_time(ended) >= 0
        with pytest.raises(ValueError, match="enable_timing"):
            begun.elapsed_time(torch.cuda.Event())
    assert not cuda.report.lines()


def test_a_capture_that_fails_can_raise_and_leaves_all_as_it_was() -> None:
    with pretend_cuda(raises=True) as cuda:
        x, graph = torch.ones(2, device=GPU), torch.cuda.CUDAGraph()

        def capture() -> None:
            with torch.cuda.graph(graph):
                x.add_(1)
                x.sum().item()

        with pytest.raises(RuntimeError, match="capturing"):
            capture()
        with pytest.raises(RuntimeError, match="preceding capture"):
            graph.replay()
        assert not torch.cuda.is_current_stream_capturing()
        assert (x + 1).tolist() == [2.0, 2.0]
    assert {f.kind for f in cuda.report.faults} == {"sync"}  # by tolist alone


def test_kernels_that_operations_are_made_of_are_counted() -> None:
    with pretend_cuda() as cuda:
        net = nn.Conv2d(2, 3, 2).to(GPU)
        x, graph = torch.ones(4, 2, 3, 3, device=GPU), torch.cuda.CUDAGraph()
        a, b, c = torch.ones(3, device=GPU), torch.ones(2, 3, device=GPU), None
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            out = net(x)
            torch.autograd.backward([out], [torch.ones_like(out)])
            c = torch.addmm(a, b, b.T @ b)
            torch.addmm(c, b, b.T @ b)
    (nodes,) = cuda.captured
    assert nodes == [
        ("convolution", 2),  # and its bias
        ("ones_like", 1),
        ("convolution_backward", 2),  # weight and bias: torch keeps both as they are
        ("mm", 1),
        ("addmm", 1),
        ("mm", 1),
        ("addmm", 2),  # a matrix is copied first
    ]
