import pytest
import torch
from torch import nn

from learner_service.networks.cnn import Convolution


@pytest.mark.parametrize("size", [4, 7])  # a map as large as the kernel takes the linear path
def test_convolution_equals_torch(size: int) -> None:
    torch.manual_seed(0)
    plain, ours = nn.Conv2d(3, 5, 4), Convolution(3, 5, 4)
    ours.load_state_dict(plain.state_dict())
    image = torch.randn(6, 3, size, size)
    torch.testing.assert_close(ours(image), plain(image))
    ours(image).square().sum().backward()
    plain(image).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad)
    torch.testing.assert_close(ours.bias.grad, plain.bias.grad)
