"""The ranks after the first: they compute their parts of the first one's orders, until it ends."""

import msgspec
import torch

from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.tensor_parallel.followed_steps import Attending, FollowedSteps, compute_part
from moesaic.models.tensor_parallel.group import RankGroup, RankMessage
from moesaic.models.tensor_parallel.leader import NewCache
from moesaic.models.tensor_parallel.plans import decode_plan
from moesaic.models.tensor_parallel.programs import CapturedForm


class Follower:
    """One rank's part of a decoder, its KV caches, and the plans of steps in progress."""

    def __init__(self, decoder: Decoder, group: RankGroup) -> None:
        """Take this rank's part, as ``Decoder.load`` reads it, and its group."""
        self._decoder, self._group = decoder, group
        self._caches: dict[int, KVCache] = {}
        self._plans: dict[int, Attending] = {}
        self._steps: dict[int, FollowedSteps] = {}
        group.releases.append(self._release)

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
                self._steps = {k: v for k, v in self._steps.items() if v.cache is not gone}
            case RankMessage.COPY:
                self._caches[first].copy_blocks([(a, b) for a, b in content.tolist()])
            case RankMessage.PLAN:
                plan, rotation = decode_plan(_bytes(content), decoder.device)
                self._plans[first] = rotation, plan, self._caches[second]
            case RankMessage.STEPS:
                wanted = msgspec.msgpack.decode(_bytes(content), type=CapturedForm)
                self._steps[first] = FollowedSteps(decoder, group, self._caches[second], wanted)
            case RankMessage.CAPTURE:
                self._steps[first].capture(second)
            case RankMessage.STEP:
                self._steps[first].compute(second, content)
            case RankMessage.ATTEND:
                compute_part(decoder, group, (kind, first), content, self._plans[second])
            case RankMessage.MLP | RankMessage.HEAD:
                compute_part(decoder, group, (kind, first), content, None)
        return True

    def _release(self) -> None:
        for steps in self._steps.values():
            steps.release()

    def _type_of(self, kind: RankMessage) -> tuple[torch.dtype, torch.device]:
        if kind in (RankMessage.ATTEND, RankMessage.MLP, RankMessage.HEAD):
            return self._decoder.dtype, self._decoder.device
        return torch.int64 if kind == RankMessage.COPY else torch.uint8, torch.device("cpu")


def _bytes(content: torch.Tensor) -> bytes:
    return bytes(content.numpy())
