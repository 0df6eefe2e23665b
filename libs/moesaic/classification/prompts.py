"""The wording of a classification prompt, as the demo checkpoint is trained on it.

Instruction and labels come before the text, so that all requests of one task share their prefix
(MoE-Prefill, section 3). The words themselves are data: ``wording.json``.
"""

from collections.abc import Sequence
from typing import Literal

from moesaic.classification.wording import PACKAGED, Wording

Method = Literal["token", "choice", "sequence", "multi"]

DEFAULT_INSTRUCTION = PACKAGED.words["instruction"]
SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def question(
    text: str,
    labels: Sequence[str],
    instruction: str,
    method: Method,
    wording: Wording = PACKAGED,
) -> str:
    """Write the whole user turn: which label has ``text``, or, for ``multi``, does the only one apply?

    Args:
        text: the text, stripped here; if empty, the result is the common prefix of all texts (not
            for ``multi``).
        labels: the answers that the caller allows, in the caller's order; for ``choice`` at most 26.
        instruction: one or two sentences that state the task.
        method: ``choice`` names each label by a letter, ``token`` and ``sequence`` ask for the label itself.
        wording: the model's words.
    """
    values = label_values(labels, SYMBOLS)
    return wording.render(
        method, instruction=instruction, text=text.strip(), label=labels[0], **values
    )


def label_values(labels: Sequence[str], symbols: str) -> dict[str, str]:
    """List the labels for a template: in a row, and each on a line after its symbol."""
    options = "".join(
        f"{symbol}. {label}\n" for symbol, label in zip(symbols, labels, strict=False)
    )
    return {"labels": "; ".join(labels), "options": options}
