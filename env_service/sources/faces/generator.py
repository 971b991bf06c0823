"""The generator of portraits and their masks, as a source."""

import hashlib

import cv2
import numpy as np

from murmur.env_service.sources.decode import planes, resize
from murmur.env_service.sources.faces.camera import middle, take_picture
from murmur.env_service.sources.faces.canvas import Canvas
from murmur.env_service.sources.faces.classes import CLASSES, FLIP_PAIRS
from murmur.env_service.sources.faces.portrait import draw_portrait
from murmur.env_service.sources.faces.textures import make_textures
from murmur.env_service.sources.size import sample_arrays
from murmur.shared.wire.samples import SPLITS, SampleSpec
from murmur.shared.wire.timestep import Array

# Of what is drawn, by whether it is square; servers that draw other pictures have another digest.
_VERSIONS = {True: 1, False: 2}


class Faces:
    """A source of drawn portraits and their masks."""

    def __init__(
        self, seed: int, size: tuple[int, int], sizes: tuple[int, int], drawn: int
    ) -> None:
        """Prepare textures.

        Args:
            seed: seed of all portraits.
            size: (height, width) of the images.
            sizes: numbers of training and validation samples.
            drawn: side of the square canvas that portraits are drawn on, pixels.
        """
        cv2.setNumThreads(1)  # workers share the cores
        self._seed, self._size = seed, size
        self._drawn, self._textures = drawn, make_textures(drawn)
        options = (_VERSIONS[size[0] == size[1]], seed, size, *sizes)
        self.spec = SampleSpec(
            name="faces",
            arrays=sample_arrays(size),
            sizes=sizes,
            digest=hashlib.sha256(repr(options).encode()).hexdigest(),
            classes=CLASSES,
            flip_pairs=FLIP_PAIRS,
        )

    def read(self, split: str, index: int) -> dict[str, Array]:
        """Draw a portrait, uint8 [3, H, W] in RGB, and its mask, uint8 [H, W] of classes."""
        rng = np.random.default_rng([self._seed, SPLITS.index(split), index])
        canvas = Canvas(self._drawn)
        head = draw_portrait(canvas, rng, self._textures)
        image = take_picture(canvas, head, self._textures, self._size, rng)
        mask = resize(middle(canvas.mask, self._size), self._size, nearest=True)
        return {"image": planes(image), "mask": mask}
