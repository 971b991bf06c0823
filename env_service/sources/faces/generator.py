"""The generator of portraits and their masks, as a source."""

import hashlib

import cv2
import numpy as np

from murmur.env_service.sources.decode import planes, resize
from murmur.env_service.sources.faces.camera import middle, take_picture
from murmur.env_service.sources.faces.canvas import Canvas
from murmur.env_service.sources.faces.classes import CLASSES, FLIP_PAIRS
from murmur.env_service.sources.faces.config import LARGEST, Config
from murmur.env_service.sources.faces.portrait import draw_portrait
from murmur.env_service.sources.faces.textures import make_textures
from murmur.env_service.sources.size import height_and_width, sample_arrays
from murmur.shared.wire.samples import SPLITS, SampleSpec
from murmur.shared.wire.timestep import Array

# Of what is drawn, by whether it is square; servers that draw other pictures have another digest.
_VERSIONS = {True: 1, False: 2}


class Faces:
    """A source of drawn portraits and their masks."""

    def __init__(self, config: Config) -> None:
        """Prepare textures."""
        cv2.setNumThreads(1)  # workers share the cores
        self._seed, self._size = config.seed, height_and_width(config.size)
        # Twice the size, for smooth edges, up to the largest.
        self._drawn = min(LARGEST, 2 * max(self._size))
        self._textures = make_textures(self._drawn)
        version = _VERSIONS[self._size[0] == self._size[1]]
        options = (version, config.seed, self._size, config.train, config.valid)
        self.spec = SampleSpec(
            name="faces",
            arrays=sample_arrays(self._size),
            sizes=(config.train, config.valid),
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
