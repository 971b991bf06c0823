"""Networks of a package outside murmur, installed into a folder as a user would."""

from pathlib import Path

ATTENTION = '''"""Attention over the agents of a joint row."""

import torch
from pydantic import BaseModel
from torch import nn


class Config(BaseModel, frozen=True, extra="forbid"):
    width: int = 16


class Attention(nn.Module):
    def __init__(self, features, width, outputs):
        super().__init__()
        self.read = nn.Linear(features, 3 * width)
        self.own = nn.Linear(features, width)
        self.out = nn.Linear(2 * width, outputs)

    def forward(self, image, vector):
        query, key, value = self.read(vector).chunk(3, -1)
        heard = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(torch.cat([heard, self.own(vector).relu()], -1))


def build(config, shape, num_outputs, slices):
    return Attention(shape.vector, config.width, num_outputs)
'''


def install(folder: Path, name: str, source: str, kind: str = "networks") -> Path:
    """A package with one plug-in, found by everything that has the folder on its path."""
    module = f"plugged_{name}"
    (folder / f"{module}.py").write_text(source)
    about = folder / f"{module}-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(f"[murmur.{kind}]\n{name} = {module}\n")
    return folder
