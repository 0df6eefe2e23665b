import pytest

from moesaic import errors
from moesaic.errors import FrameError, MoesaicError
from moesaic.transport.failure import error_of, failure_frame
from moesaic.transport.frame import Frame, FrameKind, FrameLimits

ERRORS = [
    errors.InvalidInput("top_k", "must be in 1..8", code="context_length_exceeded"),
    errors.ModelNotFound("a", "b"),
    errors.Overloaded("too many", 0.5),
    errors.NotReady("draining", 2.0, code="draining"),
    errors.StaleEpoch(3, 4),
    errors.ExpertUnavailable(2, 5, "gone"),
    errors.PlacementInfeasible(1, 2),
    errors.DeadlineExceeded("layer 3", 20.0),
    errors.PeerLost("expert-1", "reset"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was_raised(error: MoesaicError) -> None:
    request = Frame(kind=FrameKind.REQUEST, seq=9, epoch=2)
    limits = FrameLimits(1, 1, 4096)

    sent = failure_frame(request, error)
    came = error_of(Frame.decode(sent.encode(), limits))

    assert sent.answers(request) is None
    assert type(came) is type(error)
    assert str(came) == str(error)
    assert vars(came) | {"code": came.code} == vars(error) | {"code": error.code}


def test_an_unknown_error_keeps_its_code_and_text() -> None:
    class Novel(MoesaicError):
        code = "novel"

    came = error_of(failure_frame(Frame(kind=FrameKind.REQUEST), Novel("something new")))

    assert type(came) is MoesaicError
    assert (came.code, str(came)) == ("novel", "something new")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x93\xa1a\xa1b\x80",
        b"\x83\xa4code\xa1a\xa7message\xa1b\xa6detail\x81\xa5error\xaaStaleEpoch",
        b"\x83\xa4code\xa1a\xa7message\xa1b\xa6detail\x81\xa5error\x90",
    ],
)
def test_a_malformed_error_body_is_a_frame_error(body: bytes) -> None:
    with pytest.raises(FrameError):
        error_of(Frame(kind=FrameKind.ERROR, body=body))
