"""Exported segmentation gives the network's logits for pictures of any size."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from murmur.learner_service.checkpoint.contents import source_text
from murmur.learner_service.export.policy import METADATA, SUFFIX, Format, load_exported
from murmur.learner_service.export.segmentation import export_segmentation, load_segmentation
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from tests.learner_service.algorithms.test_segmentation import SEGFORMER, SPEC, UNET, build


@pytest.mark.long
@pytest.mark.parametrize("network", [UNET, SEGFORMER], ids=lambda n: n["name"])
@pytest.mark.parametrize("kind", get_args(Format))
def test_an_exported_file_takes_pictures_of_any_size(
    network: dict[str, object], kind: Format, tmp_path: Path
) -> None:
    config = validate(
        ExperimentConfig,
        {"source": {"name": "squares"}, "algorithm": {"name": "segmentation"}, "network": network},
    )
    state = {
        "source": source_text(SPEC),
        "config": config.model_dump_json(),
        "algorithm": build(network).state_dict(),
        "progress": {"updates": 7},
    }
    file = tmp_path / f"masks{SUFFIX[kind]}"
    done = export_segmentation(state, kind, file, "best.pt")
    assert done.difference < 1e-4
    assert done.about["classes"] == ["floor", "square", "stripe"]
    segmenter = load_segmentation(state, "best.pt").segmenter
    if kind == "safetensors":  # weights alone
        assert load_file(file).keys() == segmenter.state_dict().keys()
        return
    run = load_exported(file)
    for shape in ((1, 3, 16, 16), (2, 3, 33, 7), (5, 3, 9, 90)):
        image = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        with torch.inference_mode():
            wanted = segmenter({"image": torch.from_numpy(image)})
        found = run({"image": image})
        np.testing.assert_allclose(found["logits"], wanted["logits"].numpy(), rtol=1e-3, atol=1e-4)
        assert found["mask"].shape == (shape[0], *shape[2:])
        assert (found["mask"] == found["logits"].argmax(1)).all()
    if kind == "onnx":
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        about = json.loads(session.get_modelmeta().custom_metadata_map[METADATA])
        assert about["updates"] == 7
