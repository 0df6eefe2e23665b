"""Peers whose weights are others, or the same in other numbers, are no peers."""

import msgspec
import pytest

from moesaic.errors import PeerLost
from moesaic.messages.registry import Weights
from moesaic.transport.contract import Handler
from moesaic.transport.ucx.network import UcxNetwork
from tests.transport.conftest import LIMITS, SECRET
from tests.transport.linked import HANG_S

OWN = Weights(digest="a" * 64, dtype="float32", quantization="none", worker_id="far")


def changed(**fields: str) -> Weights:
    return msgspec.structs.replace(OWN, worker_id="near", **fields)


@pytest.mark.parametrize("transports", ["socket", "tcp", "ring"])
@pytest.mark.parametrize(
    ("weights", "named"),
    [
        (changed(dtype="bfloat16"), "near --dtype bfloat16 --quantization none"),
        (changed(quantization="int8"), "near --dtype float32 --quantization int8"),
        (changed(digest="b" * 64), "those of near bbbbbbbbbbbbbbbb"),
        (changed(), None),
        (changed(dtype="", quantization=""), None),
        (None, None),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_unlike_weights_are_refused_naming_both(
    echo: Handler, transports: str, weights: Weights | None, named: str | None
) -> None:
    far = UcxNetwork("far", "expert", SECRET, LIMITS, transports, weights=OWN)  # type: ignore[arg-type]
    near = UcxNetwork("near", "attention", SECRET, LIMITS, transports, weights=weights)  # type: ignore[arg-type]
    try:
        address = await far.listen("127.0.0.1", 0, echo)
        if named is None:
            await near.connect(address, "far", HANG_S)
            assert far.served_peers == ["near"]
        else:
            with pytest.raises(PeerLost) as refusal:
                await near.connect(address, "far", HANG_S)
            assert named in str(refusal.value)
            assert "far has --dtype" in str(refusal.value) or "those of far" in str(refusal.value)
            assert far.served_peers == []
    finally:
        await near.close()
        await far.close()
