"""The decoder: everything of a model but the routed experts and their gates."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.decoder_step import DecoderStepKernel, Rotation, RoutedExpertsKernel
from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.kernels.grouped_query import StepOfRows
from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.linear import Linear, PackedLinear, activation_dtype, make_linear
from moesaic.kernels.packed_matrix import PackedMatrix
from moesaic.kernels.rms_norm import add_rms_norm, rms_norm
from moesaic.models.configuration.architecture import LatentAttention, ModelConfig
from moesaic.models.configuration.division import Division, part_of
from moesaic.models.layers.attention_plan import AttentionPlan, StepPlan, plan_attention
from moesaic.models.layers.decoder_layer import AttentionLayer, DecoderLayer, load_layer
from moesaic.models.layers.grouped_query import GroupedQueryLayer
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.mlp import SharedExpert
from moesaic.models.layers.other_ranks import OtherRanks
from moesaic.models.layers.rope import RotaryEmbedding
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.layers.whole_steps import WholeSteps
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.inventory import tensor_names
from moesaic.models.weights.on_threads import on_threads
from moesaic.models.weights.tensor_names import EMBEDDING, FINAL_NORM, HEAD, layer_prefix
from moesaic.models.weights.tensor_reader import TensorReader

MoELayer = Callable[[int, Tensor], Awaitable[Tensor]]
"""The routed experts: index of the decoder layer, normed hidden states ``[T, H]`` -> their weighted
sum ``[T, H]``.

The decoder calls it, computes the shared expert, then awaits the result. So a plain function that
sends its frames before it returns an awaitable overlaps the two; a coroutine function is right too,
but starts only when awaited. It must not change the hidden states.
"""


class Decoder:
    """One replica of a model's non-expert weights. Holds no state of any sequence."""

    def __init__(
        self,
        config: ModelConfig,
        layers: list[DecoderLayer],
        embedding: Tensor | PackedMatrix,
        norm: Tensor,
        head: Linear,
        division: Division | None = None,
        others: OtherRanks | None = None,
    ) -> None:
        """Take the weights, as ``load`` reads them.

        Args:
            config: configuration of the model.
            layers: all of them.
            embedding: ``[vocab, H]``; packed where the kernels for CPUs look its rows up.
            norm: norm of the last layer's output, ``[H]``, in the dtype of activations and on their device.
            head: ``H -> vocab``.
            division: this rank's part; None: it is the only one.
            others: the other ranks, of the first one once it leads them.
        """
        self.config, self.dtype, self.device = config, norm.dtype, norm.device
        self.layers, self._embedding, self._norm, self.head = layers, embedding, norm, head
        self.division, self.others = division, others
        self._own = part_of(config, division) if division else config
        latent = isinstance(config.attention, LatentAttention)
        self._rotary = RotaryEmbedding(
            config.rope,
            config.attention.rotary_dim,
            interleaved=config.rope.interleaved,
            device=self.device,
        )
        # Latent attention and pairs of neighbours rotate in float32, whatever the model's dtype.
        in_float32 = latent or config.rope.interleaved
        self._rotation_dtype = torch.float32 if in_float32 else self.dtype

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = "none",
        *,
        division: Division | None = None,
    ) -> "Decoder":
        """Read all weights but those of routed experts and their gates.

        With a quantisation, embedding and head are int8: they are a good part of what a token reads, and the
        head's errors reach every token at full size. A head that is tied to the embedding shares its memory.
        With a ``division``, read the part of one rank of several: see ``moesaic.models.tensor_parallel``.

        Args:
            checkpoint: the weights.
            config: configuration of the model.
            dtype: dtype of weights that are not quantised; on a CPU activations are float32.
            device: device that computes.
            quantization: quantisation of linear layers and experts.
            division: division of the rank; only the first rank has the embedding.

        Raises:
            CheckpointError: a tensor is missing, mis-shaped or cannot be read.
        """
        reader = TensorReader(
            checkpoint,
            dtype,
            device,
            quantization,
            weight_format=config.weight_format,
            division=division,
        )
        own = part_of(config, division) if division else config
        shape = (config.vocab_size, config.hidden_size)
        rounding: Quantization = "none" if quantization == "none" else "int8"

        def read(name: str, *, here: bool = True) -> tuple[Tensor | PackedMatrix, Linear]:
            weight = reader.read(name, *shape)
            if not here:
                weight = weight[:1].clone()
            linear = make_linear(weight, quantization=rounding)
            if isinstance(linear, PackedLinear):
                return linear.matrix, linear
            return weight.to(activation_dtype(dtype, device)), linear

        def read_ends() -> tuple[Tensor | PackedMatrix, Linear]:
            embedding, head = read(EMBEDDING, here=division is None or division.rank == 0)
            if division:
                name = EMBEDDING if config.tie_word_embeddings else HEAD
                part = _logits_of(reader.read(name, *shape), division)
                head = make_linear(part, quantization=rounding)
            elif not config.tie_word_embeddings:
                _, head = read(HEAD)
            return embedding, head

        ends: list[tuple[Tensor | PackedMatrix, Linear]] = []
        layers: dict[int, DecoderLayer] = {}

        def load(index: int) -> None:
            if index < 0:
                ends.append(read_ends())
            else:
                layers[index] = load_layer(reader.under(layer_prefix(index)), own, index)

        names = tensor_names(config, checkpoint, experts=False)
        with checkpoint.progress.expecting(checkpoint.nbytes(names)):
            # The ends of the model are the largest: they begin first.
            on_threads(load, range(-1, config.num_layers))
            norm = reader.vector(FINAL_NORM, config.hidden_size)
        [(embedding, head)] = ends
        in_order = [layers[index] for index in range(config.num_layers)]
        # Dividing here divides the logits.
        if config.logits_scaling != 1.0:
            norm = norm.float() / config.logits_scaling
        return cls(config, in_order, embedding, norm, head, division)

    def with_ranks(self, layers: list[DecoderLayer], head: Linear, others: OtherRanks) -> "Decoder":
        """Return the same decoder with layers and a head that ``others`` compute parts of."""
        return Decoder(
            self.config, layers, self._embedding, self._norm, head, self.division, others
        )

    def new_kv_cache(
        self, num_blocks: int, block_size: int = 16, *, one_for_all: bool = False
    ) -> KVCache:
        """Reserve an empty cache that fits this decoder; see ``KVCache``."""
        return KVCache(
            self._own, num_blocks, block_size, self.dtype, self.device, one_for_all=one_for_all
        )

    def whole_steps(
        self, cache: KVCache, experts: Mapping[int, RoutedExpertsKernel] | None = None
    ) -> WholeSteps | None:
        """Prepare steps over ``cache`` that are one call each.

        Args:
            cache: the KV cache.
            experts: experts by layer; none: they are all in other processes.

        Returns:
            None if some layer has to be computed piece by piece.
        """
        layers = [
            (layer.fused, experts.get(index) if experts is not None else None)
            for index, layer in enumerate(self.layers)
        ]
        whole = [
            (attention, routed)
            for attention, routed in layers
            if attention and (routed or experts is None)
        ]
        last, head = self.layers[-1].attention, self.head
        if (
            len(whole) < len(layers)
            or any(layer.shared or layer.dense for layer in self.layers)
            or not isinstance(last, GroupedQueryLayer)
            or not isinstance(last.qkv, PackedLinear)
            or not isinstance(head, PackedLinear)
            or not isinstance(self._embedding, PackedMatrix)
        ):
            return None
        # Keys and values alone, if they begin a panel of the packed projection.
        kv = last.kv if isinstance(last.kv, PackedLinear) else last.qkv
        caches = [cache.rows(index) for index in range(len(whole))]
        kernel = DecoderStepKernel(
            whole,
            kv.matrix,
            self._embedding,
            self._norm,
            head.matrix,
            last.lying(cache.block_size),
            caches,
            self.config.embedding_multiplier,
        )
        return WholeSteps(kernel, self._rotary, cache.block_size)

    async def forward(
        self, batch: StepBatch, cache: KVCache, moe: MoELayer, *, every_row: bool = False
    ) -> Tensor:
        """Run one forward pass; see ``hidden``.

        Returns:
            float32 ``[R, vocab]``: the next-token logits of the wanted rows, in their order.
        """
        return self.logits(await self.hidden(batch, cache, moe, every_row=every_row))

    async def hidden(
        self, batch: StepBatch, cache: KVCache, moe: MoELayer, *, every_row: bool = False
    ) -> Tensor:
        """Run one forward pass up to the final norm, which writes the rows' keys and values to ``cache``.

        Rows that are not wanted skip the last layer, unless ``every_row`` is set.

        Returns:
            ``[R, H]``: the outputs of the last layer of the wanted rows, in their order.
        """
        plan = plan_attention(batch, cache.block_size, self.device)
        attending = plan.last.attending
        if every_row:
            plan = StepPlan(plan.layer, plan.layer)
        token_ids, positions = batch.on(self.device)
        hidden = await self.compute(token_ids, positions, plan, cache, moe)
        if every_row and attending is not None:
            hidden = hidden[attending]
        return hidden if any(batch.wanted) else hidden[:0]

    async def compute(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plan: StepPlan,
        cache: KVCache,
        moe: MoELayer,
    ) -> Tensor:
        """Compute a batch that is planned and on the device.

        Returns:
            The output of the last layer, ``[A, H]``, of the rows that attend in it.
        """
        hidden = self.embed(token_ids)
        delta: Tensor | None = None  # what the layer before adds to the residual stream
        *others, last = range(len(self.layers))
        rows = self.rows(positions, plan.layer, cache)
        for index in others:
            hidden, delta = await self._pass(index, hidden, delta, rows, moe)
        if plan.last is not plan.layer:
            rows = replace(rows, plan=plan.last)
        hidden, delta = await self._pass(last, hidden, delta, rows, moe)
        return hidden + delta.to(hidden.dtype)

    def rows(self, positions: Tensor, plan: AttentionPlan, cache: KVCache) -> "PassingRows":
        """Describe the rows at ``positions``, int64 ``[T]``, to the layers that they pass."""
        rotation = self._rotary.rotation(positions, self._rotation_dtype)
        return PassingRows(rotation, plan, cache, self.layers[0].attention)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the input of the first layer, ``[T, H]``, of int64 ``[T]``."""
        if isinstance(self._embedding, PackedMatrix):
            embedded = self._embedding.look_up(token_ids)
        else:
            embedded = F.embedding(token_ids, self._embedding)
        multiplier = self.config.embedding_multiplier
        return embedded if multiplier == 1.0 else embedded * multiplier

    async def compute_layer(
        self,
        index: int,
        hidden: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        cache: KVCache,
        moe: MoELayer,
    ) -> Tensor:
        """Compute one layer; layer after layer, this is what ``compute`` does.

        Args:
            index: index of the layer.
            hidden: its input, ``[T, H]``.
            positions: int64 ``[T]``.
            plan: plan of its attention.
            cache: KV cache of this layer.
            moe: the routed experts.

        Returns:
            Its output, ``[A, H]``.
        """
        rows = self.rows(positions, plan, cache)
        hidden, delta = await self._pass(index, hidden, None, rows, moe)
        return hidden + delta.to(hidden.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits, float32 ``[R, vocab]``, of outputs of the last layer, ``[R, H]``."""
        return self.head(rms_norm(hidden, self._norm, self.config.rms_norm_eps)).float()

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the outputs of the final norm, float32 ``[R, H]``, of outputs of the last layer, ``[R, H]``."""
        normed = rms_norm(hidden, self._norm, self.config.rms_norm_eps).float()
        # The norm's weights divide the logits too.
        return normed * self.config.logits_scaling

    def dense(self, index: int) -> GatedMLP | None:
        """The MLP of a dense layer; ``None`` for a sparse one."""
        return self.layers[index].dense

    def shared(self, index: int) -> SharedExpert | None:
        """The shared expert of a sparse layer, if it has one."""
        return self.layers[index].shared

    async def _pass(
        self,
        index: int,
        hidden: Tensor,
        delta: Tensor | None,
        rows: "PassingRows",
        moe: MoELayer,
    ) -> tuple[Tensor, Tensor]:
        """Pass one layer.

        Returns:
            ``hidden`` after its attention, and the output of its MLP, not added yet.
        """
        layer = self.layers[index]
        hidden, normed = self.attend(index, hidden, delta, rows)
        if layer.dense is not None:
            return hidden, layer.dense(normed)
        # May be in flight while the shared expert is computed.
        routed = moe(index, normed)
        if layer.shared is None:
            return hidden, await routed
        return hidden, layer.shared(normed) + await routed

    def attend(
        self, index: int, hidden: Tensor, delta: Tensor | None, rows: "PassingRows"
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream after a layer's attention, and its norm, ``[A, H]`` each."""
        layer = self.layers[index]
        eps, attending = self.config.rms_norm_eps, rows.plan.attending
        if layer.fused is not None and attending is None:
            return layer.fused(hidden, delta, rows.fused, rows.cache.rows(index))
        if delta is None:
            normed = rms_norm(hidden, layer.attention_norm, eps)
        else:
            hidden, normed = add_rms_norm(hidden, delta, layer.attention_norm, eps)
        attended = layer.attention(normed, rows.rotation, rows.plan, rows.cache)
        if attending is not None:
            hidden = hidden[attending]
        return add_rms_norm(hidden, attended, layer.mlp_norm, eps)


@dataclass(frozen=True)
class PassingRows:
    """The rows that pass the layers, as these see them."""

    rotation: Rotation
    plan: AttentionPlan
    cache: KVCache
    attention: AttentionLayer  # of any layer

    @cached_property
    def fused(self) -> StepOfRows:
        """The same for layers whose attention is one call; built once."""
        assert isinstance(self.attention, GroupedQueryLayer)
        return self.attention.step_of(self.rotation, self.plan)


def _logits_of(head: Tensor, division: Division) -> Tensor:
    """Return a rank's rows of the head, ``[vocab, H]``; zeros where the vocabulary ends."""
    tokens = division.vocabulary(len(head))
    part = head.new_zeros(division.tokens_each(len(head)), head.shape[1])
    part[: len(tokens)] = head[tokens.start : tokens.stop]
    return part
