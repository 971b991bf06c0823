"""For every test one torch thread and the same random numbers.

The tests' tensors are small, and other processes want their cores.
"""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_random_tensors() -> None:
    """A test that passes or fails does so again, whichever ran before it."""
    torch.manual_seed(0)
