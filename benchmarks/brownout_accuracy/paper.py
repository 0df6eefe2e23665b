"""Figures of BrownoutServe, and the points that it singles out."""

WAYS = (2, 4, 8)
TABLE_1 = {  # average accuracy loss in percent, by threshold: ways 2, 4 and 8, full brownout
    0.8: (0.88, 0.80, 1.59, 4.51),
    0.6: (2.34, 2.38, 2.66, 9.58),
    0.4: (2.92, 3.63, 4.82, 35.07),
    0.2: (3.30, 5.18, 10.71, 95.08),
    0.0: (4.70, 11.53, 15.77, 100.00),
}
POINTS = ((2, 0.0), (4, 0.2), (8, 0.4))  # way, threshold
TARGET = 0.047
MODEL = "Qwen1.5-MoE-A2.7B-Chat (60 experts a layer, top-4, four shared), 5-shot PIQA, COPA, CEVAL and OBQA"


def loss_at(way: int, threshold: float) -> float:
    """Look a loss up, 0 to 1; way 0: full brownout."""
    column = WAYS.index(way) if way else len(WAYS)
    return TABLE_1[threshold][column] / 100
