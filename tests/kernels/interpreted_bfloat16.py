"""The bfloat16 of a GPU, for Triton's interpreter."""

from functools import cache
from typing import Any

import numpy as np
import torch


@cache
def compute_bfloat16_as_a_gpu() -> None:
    """Mend the interpreter, for the rest of the process.

    It keeps bfloat16 as bit patterns, which it multiplies as integers in ``tl.dot``, and it cuts
    float32 off where a GPU rounds to the nearest.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    dot, cast = builder.create_dot, builder.cast_impl

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        rounded = torch.from_numpy(np.array(source.data, np.float32)).bfloat16()
        return handle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    for name in [name for name in vars(builder) if vars(builder)[name] is dot]:
        setattr(builder, name, create_dot)
    builder.cast_impl = cast_impl
