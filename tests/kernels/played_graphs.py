"""CUDA graphs, played on a CPU: what is captured are torch's operations and kernels' launches, with the tensors.

A replay does the same to the same tensors, and runs nothing of Python's in between. So it shows
whatever a captured step has read from elsewhere, or left there. Each thread captures graphs of its own.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class PlayedGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def pool(self) -> str:
        return "pool"

    def reset(self) -> None:
        self.steps.clear()

    def note(self, function: Any, *arguments: Any) -> None:
        """Capture a call that is not torch's: a launch, or what ranks do together."""
        self.steps.append((function, arguments, {}, None))

    def replay(self) -> None:
        assert self.steps, "an empty graph is captured for nothing"
        for function, arguments, named, result in self.steps:
            again = function(*arguments, **named)
            if isinstance(result, Tensor) and not _same_memory(again, result):
                result.copy_(again)
            elif isinstance(result, list | tuple):
                for old, new in zip(result, again, strict=True):
                    if not _same_memory(new, old):
                        old.copy_(new)


_own = threading.local()
# The interpreter keeps its grid, and what it replaces of the language, for all threads.
_one_at_a_time = threading.RLock()


def capturing() -> PlayedGraph | None:
    """Return the graph that this thread captures."""
    return getattr(_own, "graph", None)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class _Capture(TorchDispatchMode):
    def __init__(self, graph: PlayedGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host asks the device"
        result = func(*args, **(kwargs or {}))
        self.graph.steps.append((func, args, kwargs or {}, result))
        return result


@contextmanager
def played_graphs() -> Iterator[list[Any]]:
    """Play graphs for the length of the block; gives the pools that they were captured into."""
    from triton.runtime import interpreter

    launch = interpreter.InterpretedFunction.run
    pools: list[Any] = []

    @contextmanager
    def graph(captured: PlayedGraph, pool: Any = None, **_: Any) -> Iterator[None]:
        pools.append(pool)
        _own.graph = captured
        try:
            with _Capture(captured):
                yield
        finally:
            _own.graph = None

    def launched(*args: Any, **kwargs: Any) -> Any:
        with _one_at_a_time:
            return launch(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            result = launched(*args, **kwargs)
        if graph := capturing():
            graph.note(partial(launched, **kwargs), *args)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", PlayedGraph)
        patch.setattr(torch.cuda, "graph", graph)
        patch.setattr(interpreter.InterpretedFunction, "run", run)
        yield pools
