"""The compilations that launches would need on a GPU: Triton's own keys, taken while kernels are interpreted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def launch_keys(*, run: bool) -> Iterator[set[str]]:
    """Collect, for the length of the block, the kernels that are launched, each with what it is specialised on.

    Without ``run`` they are not interpreted, which takes long: their results may be anything.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import interpreter, jit

    backend = make_backend(GPUTarget("cuda", 90, 32))
    binders: dict[Any, Any] = {}
    found: set[str] = set()
    launch = interpreter.InterpretedFunction.run

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self.fn not in binders:
            kernel = jit.JITFunction(self.fn, **self.kwargs)
            signature, params = kernel.signature, kernel.params
            binders[self.fn] = jit.create_function_from_signature(signature, params, backend)
        _, specialization, options = binders[self.fn](*args, **kwargs)
        found.add(f"{self.__name__} {jit.compute_cache_key({}, specialization, options)}")
        return launch(self, *args, grid=grid, warmup=warmup or not run, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "run", note)
        yield found
