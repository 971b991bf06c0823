"""Act with an exported policy: needs NumPy and ONNX Runtime, not murmur.

python run_exported.py policy.onnx
"""

import json
import sys

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
about = json.loads(session.get_modelmeta().custom_metadata_map["murmur"])
outputs = [output.name for output in session.get_outputs()]
given = {x["name"]: np.ones((4, *x["shape"]), x["dtype"]) for x in about["inputs"]}  # 4 teams
if "memory" in given:
    given["memory"][:] = 0  # where an episode begins
for step in range(3):  # here goes the environment: it gives observations, it takes actions
    result = dict(zip(outputs, session.run(outputs, given), strict=True))
    action = result["action"]
    assert not (np.isnan(action) if action.dtype.kind == "f" else action < 0).any(), "see export.md"
    given |= {"memory": result["next_memory"]} if "memory" in given else {}
    print(f"step {step}: actions {action.tolist()}")
