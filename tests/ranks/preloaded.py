"""What the server that test processes fork from imports: it must start no thread."""

import torch
import torch.distributed

import murmur.learner_service.app
import tests.ranks.cases
import tests.ranks.jobs
import tests.ranks.pictures

torch.set_num_threads(1)
__all__ = ["murmur", "tests", "torch"]
