"""Every kernel compiles for a Hopper GPU and fits it, though there is none here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.native.kept import kept

triton = pytest.importorskip("triton", reason="triton is not installed")

KERNELS = Path(__file__).parents[3] / "libs/moesaic/kernels"
SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
SHARED_BYTES = 227 * 1024  # what a program may have of a multiprocessor's shared memory
LESS_BYTES = 163 * 1024  # the same on a GPU before Hopper
STACK_BYTES = 512  # a latent tile of 64 rows spills 328 beside its loop over keys, none within

ATTENDING = "_attend_kernel", "_attend_pieces_kernel"


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """What became of every kernel; known from an earlier run as long as no source has changed."""
    sources = [*sorted(KERNELS.rglob("*.py")), SCRIPT]
    read = [triton.__version__.encode(), *(source.read_bytes() for source in sources)]
    return [json.loads(line) for line in kept("hopper", read, _compile).read_text().splitlines()]


def _compile(target: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(target.with_name("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    target.write_text(done.stdout)


def test_every_kernel_fits_the_registers_and_the_shared_memory(
    compiled: list[dict[str, Any]],
) -> None:
    too_large = [
        kernel
        for kernel in compiled
        if kernel["shared_bytes"] > SHARED_BYTES or kernel["stack_bytes"] > STACK_BYTES
    ]

    assert not too_large
    products = [k for k in compiled if k["kernel"] in ("_gate_up_kernel", "_down_kernel")]
    assert not [kernel for kernel in products if kernel["stack_bytes"]]
    assert len({kernel["kernel"] for kernel in compiled}) == 20


def test_tiles_are_smaller_where_there_is_less_shared_memory(
    compiled: list[dict[str, Any]],
) -> None:
    fitted = [kernel for kernel in compiled if kernel["case"] == "less memory"]

    assert {"_down_kernel", "_attend_kernel"} <= {kernel["kernel"] for kernel in fitted}
    assert all(kernel["shared_bytes"] <= LESS_BYTES for kernel in fitted)


def test_wide_products_use_the_instructions_of_the_tensor_cores(
    compiled: list[dict[str, Any]],
) -> None:
    products = [k for k in compiled if k["kernel"] in ("_gate_up_kernel", "_down_kernel")]
    products += [k for k in compiled if k["kernel"] in ATTENDING]

    assert all(kernel["wgmma"] or kernel["mma"] for kernel in products)
    assert all(kernel["wgmma"] for kernel in products if "prefill" in kernel["case"])
    assert all(kernel["async_copies"] for kernel in products)


def test_products_of_attention_wait_for_each_other_once_a_step(
    compiled: list[dict[str, Any]],
) -> None:
    attending = [k for k in compiled if k["kernel"] in ATTENDING and k["wgmma"]]

    # If other instructions write where a product goes, the assembler waits after each of twenty or more.
    assert all(kernel["wgmma_waits"] < 5 for kernel in attending)


def test_prompts_spill_no_registers(compiled: list[dict[str, Any]]) -> None:
    cases = {"attention, prefill", "attention, chunk in pieces", "gpt-oss, prefill"}
    prompts = [k for k in compiled if k["kernel"] == "_attend_kernel" and k["case"] in cases]

    assert {kernel["case"] for kernel in prompts} == cases
    assert not any(kernel["stack_bytes"] for kernel in prompts)


def test_the_sampler_fuses_no_product_and_sum_and_spills_next_to_nothing(
    compiled: list[dict[str, Any]],
) -> None:
    [sampler] = [kernel for kernel in compiled if kernel["case"] == "sampling"]

    assert sampler["fused"] == 0  # its tokens would be others than a CPU's
    assert sampler["stack_bytes"] <= 16
