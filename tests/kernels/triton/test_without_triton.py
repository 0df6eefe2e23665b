"""triton is optional."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # an import of it fails
import moesaic.kernels.paged_attention, moesaic.dispatch.local, moesaic.models.layers.decoder
"""


def test_models_are_computed_without_triton() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
