"""Where kernels run: on a GPU where there is one, else in Triton's interpreter."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.native.library import library

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(scope="session", params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each test of a kernel runs in the interpreter, on tensors of the CPU, and on a GPU."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if request.param == "cuda" and interpreted:
        pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled")
    if request.param == "cpu" and not interpreted:
        pytest.skip("kernels are compiled for the CUDA device here, not interpreted")
    return torch.device(request.param)


@pytest.fixture
def gpu(device: torch.device) -> Iterator[torch.device]:
    """Give a GPU: a fake one where kernels are interpreted."""
    if device.type == "cuda":
        yield device
        return
    from tests.fake_device.cuda import fake_device

    with fake_device():
        yield torch.device("cuda", 0)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """Where the random model of a case of parity lies, which is built once."""
    # Imported here: the machine of `make gpu` may lack what it imports.
    from benchmarks.parity.cases import build_reference

    found: dict[str, Path] = {}

    def built(case: Any) -> Path:
        if str(case) not in found:
            found[str(case)] = tmp_path_factory.mktemp("model")
            build_reference(case, found[str(case)])
        return found[str(case)]

    return built


@pytest.fixture(scope="session")
def native() -> None:
    """The CPU's kernels; tests/builds.sh runs what needs them once for each build of them."""
    assert library() is not None, "the CPU's kernels cannot be compiled here: install gcc"


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """Divide work on every machine, however many cores it has; a test may set another number."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _gpu_where_it_is_needed(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def _bfloat16_as_on_a_gpu() -> None:
    """Give the interpreter the bfloat16 of a GPU."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    from tests.kernels.interpreted_bfloat16 import compute_bfloat16_as_a_gpu

    compute_bfloat16_as_a_gpu()


@pytest.fixture
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Take the ways of a GPU, and collect what would be compiled there: see ``launch_keys``.

    A parameter of false leaves it at that, and runs no kernel.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for the CUDA device here, not interpreted")
    from tests.kernels.launch_keys import launch_keys
    from tests.kernels.ways_of_a_gpu import take_the_ways_of_a_gpu

    take_the_ways_of_a_gpu(monkeypatch)
    with launch_keys(run=getattr(request, "param", True)) as keys:
        yield keys
