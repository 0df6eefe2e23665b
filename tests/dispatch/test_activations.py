"""What workers count of the batches they see."""

import torch

from moesaic.dispatch.activations import ActivationMeter
from moesaic.messages.activation_report import ServedBatches

TOPK_IDS = torch.tensor([[0, 1], [0, 2], [3, 1]], dtype=torch.int32)


def test_a_report_has_what_came_since_the_last_one_epoch_by_epoch() -> None:
    meter = ActivationMeter(4)
    who = {"worker_id": "e", "generation": 1, "model_digest": "m", "epoch": 3}
    meter.record(2, 0, TOPK_IDS, 3)
    meter.record(3, 0, TOPK_IDS, 2)
    meter.record(3, 1, TOPK_IDS[:1], 1)
    meter.record(3, 1, TOPK_IDS[:0], 0)  # of no rows

    first = meter.report(**who)  # type: ignore[arg-type]

    assert first.served == [
        ServedBatches(epoch=2, batches=1, busiest=3),
        ServedBatches(epoch=3, batches=2, busiest=3),
    ]
    assert [layer.batches for layer in first.window.layers] == [2, 1]
    assert first.window.layers[0].tokens == [4, 4, 2, 2]
    assert meter.report(**who).window.layers == []  # type: ignore[arg-type]
