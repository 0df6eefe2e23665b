"""The ranks after the first: they compute their parts of the first one's orders, until it ends."""

import msgspec
import torch

from moesaic.kernels.decoder_step import Rotation
from moesaic.models.layers.attention_plan import AttentionPlan
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.tensor_parallel.group import RankGroup, RankMessage
from moesaic.models.tensor_parallel.leader import NewCache
from moesaic.models.tensor_parallel.plans import decode_plan


class Follower:
    """One rank's part of a decoder, its KV caches, and the plans of steps in progress."""

    def __init__(self, decoder: Decoder, group: RankGroup) -> None:
        """Take this rank's part, as ``Decoder.load`` reads it, and its group."""
        self._decoder, self._group = decoder, group
        self._caches: dict[int, KVCache] = {}
        self._plans: dict[int, tuple[AttentionPlan, Rotation, KVCache]] = {}

    def run(self) -> None:
        """Compute until the first rank ends the group.

        If that fails, as without memory, the instance is lost. An orderly end would wait for operations
        on the device that wait for other ranks.
        """
        device = self._decoder.device
        if device.type == "cuda":
            # Kernels that name no device run on this one.
            torch.cuda.set_device(device)
        with torch.inference_mode():
            try:
                while self._follow():
                    pass
            except Exception as error:
                self._group.lose(error)

    def _follow(self) -> bool:
        group, decoder = self._group, self._decoder
        kind, first, second, content = group.hear(self._type_of)
        match kind:
            case RankMessage.END:
                return False
            case RankMessage.CACHE:
                form = msgspec.msgpack.decode(_bytes(content), type=NewCache)
                self._caches[first] = decoder.new_kv_cache(
                    form.num_blocks, form.block_size, one_for_all=form.one_for_all
                )
            case RankMessage.FORGET:
                gone = self._caches.pop(first)
                self._plans = {k: v for k, v in self._plans.items() if v[2] is not gone}
            case RankMessage.COPY:
                self._caches[first].copy_blocks([(a, b) for a, b in content.tolist()])
            case RankMessage.PLAN:
                plan, rotation = decode_plan(_bytes(content), decoder.device)
                self._plans[first] = plan, rotation, self._caches[second]
            case RankMessage.ATTEND:
                plan, rotation, cache = self._plans[second]
                group.sum(decoder.layers[first].attention(content, rotation, plan, cache))
            case RankMessage.MLP:
                layer = decoder.layers[first]
                mlp = layer.dense or (layer.shared and layer.shared.mlp)
                assert mlp is not None
                group.sum(mlp(content))
            case RankMessage.HEAD:
                group.side_by_side(decoder.head(content))
        return True

    def _type_of(self, kind: RankMessage) -> tuple[torch.dtype, torch.device]:
        if kind in (RankMessage.ATTEND, RankMessage.MLP, RankMessage.HEAD):
            return self._decoder.dtype, self._decoder.device
        return torch.int64 if kind == RankMessage.COPY else torch.uint8, torch.device("cpu")


def _bytes(content: torch.Tensor) -> bytes:
    return bytes(content.numpy())
