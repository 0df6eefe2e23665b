"""What was recorded is not lost at the end for a reason that was there at the beginning."""

import pytest

from moesaic.cli.clients.traces import Recording, _begin
from moesaic.errors import InvalidInput
from moesaic.placement.traffic.trace import Trace
from moesaic.v1 import attention_pb2 as pb


def shape(model_digest: str) -> pb.TraceShape:
    return pb.TraceShape(model_digest=model_digest, num_experts=4, top_k=2, layers=[0, 1])


def test_a_file_of_another_model_is_refused_before_anything_is_recorded() -> None:
    recording = Recording("part", 10, before=Trace("one", 4, 2, (0, 1), ("part",), ()))

    with pytest.raises(InvalidInput, match="another model"):
        _begin(recording, shape("other"))
    _begin(recording, shape("one"))

    assert recording.begun.is_set()
