"""What streams are told of the prefix cache: changes, and all that they come to."""

import pytest

from moesaic.engine.sequences.blocks import BlockPool
from moesaic.services.attention import streams
from moesaic.services.attention.streams import BlockLog
from moesaic.v1 import attention_pb2 as pb

A, B, C = (bytes([n]) * 16 for n in range(3))
PROFILE = pb.EngineProfile(max_step_tokens=8, naming=b"x")


def test_changes_say_what_can_be_found_now_and_is_not_known_yet() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(first, A)
    pool.publish(second, B)
    assert pool.take_changes() == ([A, B], [])

    pool.give_back([first])
    [reused] = pool.take(1)  # A goes
    assert pool.take_changes() == ([], [A])
    pool.publish(reused, C)
    pool.give_back([reused])
    [reused] = pool.take(1)  # C goes before anybody knew of it
    pool.publish(reused, A)

    assert pool.take_changes() == ([A], [C])
    assert pool.take_changes() == ([], [])


def test_a_snapshot_is_what_all_changes_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PART_BLOCKS", 2)
    log = BlockLog(PROFILE)
    sequences = [
        log.change(stored, evicted).block_changes.sequence
        for stored, evicted in [([A, B], []), ([C], [A]), ([A], [b"?" * 16])]
    ]

    parts = [part.block_snapshot for part in log.snapshot()]
    assert sequences == [1, 2, 3]
    assert b"".join(part.hashes for part in parts) == B + C + A
    assert [part.first for part in parts] == [True, False]
    assert {part.sequence for part in parts} == {3}
    assert parts[0].engine == PROFILE
    assert len(list(BlockLog(PROFILE).snapshot())) == 1  # an empty cache is told as well
