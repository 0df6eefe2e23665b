"""The first rank: the residual stream is here alone, and the others add their parts to each product of it."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.errors import UnusableSettings
from moesaic.kernels.decoder_step import Rotation
from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.kernels.linear import Linear
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.layers.attention_plan import AttentionPlan
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.decoder_layer import AttentionLayer, DecoderLayer
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.tensor_parallel.followed_steps import memory_for, told_step
from moesaic.models.tensor_parallel.group import RankGroup, RankMessage
from moesaic.models.tensor_parallel.plans import encode_plan
from moesaic.models.tensor_parallel.programs import (
    CapturedForm,
    Part,
    RanksDiffer,
    described,
    parts_of,
)

_KNOWN_PLANS = 32  # of steps under way: one or two for each part of a step, and those of a sweep
_NOTHING = torch.zeros(0, dtype=torch.uint8)


class NewCache(msgspec.Struct, frozen=True, array_like=True):
    """The form of a KV cache that all ranks have a part of."""

    num_blocks: int
    block_size: int
    one_for_all: bool


class Leading:
    """The others as the parts of the first rank see them. Used on the engine's thread alone."""

    def __init__(self, group: RankGroup) -> None:
        """Take the group, whose others listen."""
        self.group = group
        self._caches = weakref.WeakKeyDictionary[KVCache, int]()
        self._next_cache, self._gone = 0, deque[int]()
        self._plans: dict[
            int, tuple[AttentionPlan, int]
        ] = {}  # by slot: what the others know there
        self._next_plan = 0
        self._next_steps = 0
        # While a step is captured, what the others compute next without being told.
        self._expected: Iterator[Part] | None = None

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Compute a part for which the other ranks wait.

        If it fails, as without memory, the instance is lost: the others would take the next message for
        this part.
        """
        try:
            yield
        except Exception as error:
            self.group.lose(error)

    def tell(self, kind: RankMessage, index: int, plan: int, rows: Tensor) -> None:
        """Have the others compute their parts of a product of ``rows``, as ``compute_part`` does."""
        if self._expected is None:
            self.group.tell(kind, index, plan, rows)
            return
        if (part := next(self._expected)) != (kind, index):
            raise RanksDiffer(f"rank 0 computes {kind.name} {index}, the others {part}")
        self.group.spread(rows)

    @contextmanager
    def expecting(self, parts: Sequence[Part]) -> Iterator[None]:
        """Tell nothing in the block: the others compute ``parts`` over and over."""
        self._expected = cycle(parts)
        try:
            yield
        finally:
            self._expected = None

    def prepare(self, cache: KVCache, form: CapturedForm) -> int:
        """Let the others prepare for captured steps; gives the number that these have in messages."""
        number, self._next_steps = self._next_steps, self._next_steps + 1
        content = torch.frombuffer(bytearray(msgspec.msgpack.encode(form)), dtype=torch.uint8)
        self.group.tell(RankMessage.STEPS, number, self._cache(cache), content)
        return number

    def announce(self, plan: AttentionPlan, rotation: Rotation, cache: KVCache) -> int:
        """Make sure that the others know a plan and a cache; in captured steps they do.

        Returns:
            The number of the plan.
        """
        if self._expected is not None:
            return 0
        number = self._cache(cache)
        for slot, (known, of) in self._plans.items():
            if known is plan and of == number:
                return slot
        slot = self._next_plan % _KNOWN_PLANS
        self._next_plan += 1
        content = torch.frombuffer(bytearray(encode_plan(plan, rotation)), dtype=torch.uint8)
        self.group.tell(RankMessage.PLAN, slot, number, content)
        self._plans[slot] = plan, number
        return slot

    def _cache(self, cache: KVCache) -> int:
        while self._gone:
            self.group.tell(RankMessage.FORGET, self._gone.popleft(), 0, _NOTHING)
        number = self._caches.get(cache)
        if number is None:
            number, self._next_cache = self._next_cache, self._next_cache + 1
            form = NewCache(cache.num_blocks, cache.block_size, cache.one_for_all)
            content = torch.frombuffer(bytearray(msgspec.msgpack.encode(form)), dtype=torch.uint8)
            self.group.tell(RankMessage.CACHE, number, 0, content)
            self._caches[cache] = number
            cache.on_copy = partial(self._copy, number)
            weakref.finalize(cache, self._gone.append, number)
        return number

    def _copy(self, cache: int, pairs: Sequence[tuple[int, int]]) -> None:
        self.group.tell(RankMessage.COPY, cache, 0, torch.tensor(pairs, dtype=torch.int64))


@dataclass(frozen=True)
class DividedAttention:
    """The attention of one layer, whose heads are in all ranks; an ``AttentionLayer``."""

    leading: Leading
    index: int
    own: AttentionLayer

    def __call__(
        self, hidden_states: Tensor, rotation: Rotation, plan: AttentionPlan, cache: KVCache
    ) -> Tensor:
        """See ``AttentionLayer``."""
        number = self.leading.announce(plan, rotation, cache)
        self.leading.tell(RankMessage.ATTEND, self.index, number, hidden_states)
        with self.leading.awaited():
            part = self.own(hidden_states, rotation, plan, cache)
        return self.leading.group.sum(part)


@dataclass(frozen=True)
class DividedMLP:
    """The MLP of a dense layer or of a shared expert, whose inner width is in all ranks; a ``GatedMLP``."""

    leading: Leading
    index: int
    own: GatedMLP

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return self.own.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """See ``GatedMLP``."""
        self.leading.tell(RankMessage.MLP, self.index, 0, x)
        with self.leading.awaited():
            part = self.own(x)
        return self.leading.group.sum(part)


@dataclass(frozen=True)
class DividedHead:
    """The head, whose vocabulary is in all ranks; a ``Linear``."""

    leading: Leading
    own: Linear
    vocab_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return self.own.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``; of no rows, without a word to the others."""
        if not len(x):
            return x.new_empty(0, self.vocab_size)
        self.leading.tell(RankMessage.HEAD, 0, 0, x)
        with self.leading.awaited():
            part = self.own(x)
        return self.leading.group.side_by_side(part)[:, : self.vocab_size]

    def behind(self, first: int) -> Linear:
        """Refuse: nobody asks for a part of a vocabulary."""
        raise NotImplementedError


@dataclass(frozen=True)
class LedSteps:
    """The other ranks' parts of the captured steps over one cache; a ``StepsOfRanks``."""

    leading: Leading
    number: int
    parts: Sequence[Part]

    @contextmanager
    def capturing(self, size: int) -> Iterator[None]:
        """See ``StepsOfRanks``."""
        group = self.leading.group
        group.tell(RankMessage.CAPTURE, self.number, size, _NOTHING)
        with (
            self.leading.awaited(),
            memory_for(group.device, size),
            self.leading.expecting(self.parts),
        ):
            yield

    def begin(self, facts: NDArray[np.int64], tables: NDArray[np.int32]) -> None:
        """See ``StepsOfRanks``."""
        content = told_step(facts, tables)
        self.leading.group.tell(RankMessage.STEP, self.number, len(tables), content)

    def awaited(self) -> AbstractContextManager[None]:
        """See ``StepsOfRanks``."""
        return self.leading.awaited()


@dataclass(frozen=True)
class FollowingRanks:
    """The other ranks, as captured steps see them; an ``OtherRanks``."""

    leading: Leading
    config: ModelConfig

    def prepare(
        self,
        cache: KVCache,
        max_rows: int,
        max_length: int,
        release: Callable[[], None],
        *,
        whole: bool,
    ) -> LedSteps:
        """See ``OtherRanks``."""
        form, group = CapturedForm(max_rows, max_length, whole), self.leading.group
        number = self.leading.prepare(cache, form)
        if not group.agree(described(self.config, form, cache.block_size)):
            raise UnusableSettings(
                "tensor_parallel", "ranks would capture different steps: start them alike"
            )
        group.releases.append(release)
        parts = list(chain.from_iterable(parts_of(self.config, form)))
        return LedSteps(self.leading, number, parts)


def lead(decoder: Decoder, group: RankGroup) -> Decoder:
    """Return a decoder that computes with all ranks of ``group``; ``decoder`` has this rank's part."""
    leading = Leading(group)

    def divided(index: int, layer: DecoderLayer) -> DecoderLayer:
        return replace(
            layer,
            attention=DividedAttention(leading, index, layer.attention),
            fused=None,  # the sum over ranks is between attention and the norm behind it
            dense=layer.dense and DividedMLP(leading, index, layer.dense),
            shared=layer.shared
            and replace(layer.shared, mlp=DividedMLP(leading, index, layer.shared.mlp)),
        )

    layers = [divided(index, layer) for index, layer in enumerate(decoder.layers)]
    head = DividedHead(leading, decoder.head, decoder.config.vocab_size)
    return decoder.with_ranks(layers, head, FollowingRanks(leading, decoder.config))
