"""One torch thread: the tests' tensors are small, and other processes want their cores."""

import torch

torch.set_num_threads(1)
