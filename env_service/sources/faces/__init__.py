"""Portraits drawn by a seeded generator, with the 19 classes of CelebAMask-HQ; no files needed.

Heads differ in shape, pose, skin, hair, hats, glasses, jewellery, clothes and expression; pictures
in background, light, occlusion, texture, focus and camera noise. Sample (split, index) is a pure
function of the seed, the split and the index, on machines with the same OpenCV and NumPy.

`l_eye` and the other left parts are those on the left of the picture when the head is upright.
"""

from murmur.env_service.sources.faces.config import Config as Config
from murmur.env_service.sources.source import Source


def build(config: Config) -> Source:
    """Make the source."""
    from murmur.env_service.sources.faces.generator import Faces  # which needs OpenCV

    return Faces(config)
