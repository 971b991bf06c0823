"""murmur's Adam is torch's bit for bit, and a learner does without torch's compiler."""

import subprocess
import sys

import pytest
import torch

from murmur.doctor.machine import ROOT
from murmur.learner_service.device.adam import Adam, step_together

# A process of its own: this one may have imported the compiler for another test.
_LEARNERS = """\
import sys
import murmur.learner_service.app
from tests.learner_service.algorithms.test_contract import CASES
for name in ("mappo", "coma", "masac", "maddpg", "qmix"):
    case = CASES[f"{name}-discrete-shared-plain"]
    algorithm = case.build()
    algorithm.update(case.batch(algorithm))
    algorithm.load_state_dict(algorithm.state_dict())
    assert "torch._dynamo" not in sys.modules, name
"""


def test_learners_do_without_torchs_compiler() -> None:
    run = subprocess.run([sys.executable, "-c", _LEARNERS], cwd=ROOT, check=False)
    assert run.returncode == 0


@pytest.mark.parametrize("fused", [False, True])
def test_adam_equals_torchs_to_the_bit(fused: bool) -> None:
    starts = [torch.randn(4, 3), torch.randn(3)]
    gradients = [[torch.randn_like(p) for p in starts] for _ in range(5)]

    def trained(kind: type[torch.optim.Adam]) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(p.clone()) for p in starts]
        groups = [{"params": [parameters[0]], "lr": 0.1}, {"params": [parameters[1]], "lr": 0.01}]
        optimizer = kind(groups, eps=1e-5, fused=fused)
        for i, gradient in enumerate(gradients):
            if i == 3:  # continue from what was saved
                saved = optimizer.state_dict()
                optimizer = kind(groups, fused=fused)
                optimizer.load_state_dict(saved)
            optimizer.zero_grad()
            assert all(p.grad is None for p in parameters)
            for parameter, part in zip(parameters, gradient, strict=True):
                parameter.grad = part.clone()
            optimizer.step()
        return [p.detach() for p in parameters]

    for ours, theirs in zip(trained(Adam), trained(torch.optim.Adam), strict=True):
        assert torch.equal(ours, theirs)
        assert not ours.requires_grad


def test_optimizers_that_step_together_step_as_alone_to_the_bit() -> None:
    starts = [torch.randn(4, 3), torch.randn(3)]
    gradients = [[torch.randn_like(p) for p in starts] for _ in range(4)]
    found = []
    for together in (False, True):
        parameters = [torch.nn.Parameter(p.clone()) for p in starts]
        optimizers = [
            Adam([p], lr=0.1 / (i + 1), eps=1e-5, fused=True) for i, p in enumerate(parameters)
        ]
        for gradient in gradients:
            for parameter, part, optimizer in zip(parameters, gradient, optimizers, strict=True):
                parameter.grad = part.clone()
                optimizer.grad_scale = torch.tensor(2.0)
            if together:
                step_together(optimizers)
            else:
                for optimizer in optimizers:
                    optimizer.step()
        steps = [
            optimizer.state[p]["step"] for optimizer, p in zip(optimizers, parameters, strict=True)
        ]
        found.append([*(p.detach() for p in parameters), *steps])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
