"""The wording of a classification prompt.

One module words them, because accuracy depends on the exact words: the gateway renders requests
with it and the demo checkpoint is trained on it. Instruction and labels come before the text, so
that all requests of one task share their prefix (MoE-Prefill, section 3).
"""

from collections.abc import Sequence
from typing import Literal

Method = Literal["token", "choice", "sequence"]

DEFAULT_INSTRUCTION = "Classify the text."
SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def question_head(labels: Sequence[str], instruction: str, method: Method) -> str:
    """Word everything of the question that comes before the text itself.

    Args:
        labels: what the caller may answer, in the caller's order; for ``choice`` at most 26.
        instruction: one or two sentences that state the task.
        method: ``choice`` names each label by a letter, the others ask for the label itself.
    """
    if method == "choice":
        options = "".join(
            f"{symbol}. {label}\n" for symbol, label in zip(SYMBOLS, labels, strict=False)
        )
        return f"{instruction} Choose exactly one of:\n{options}\n"
    return f"{instruction} Choose exactly one of: {'; '.join(labels)}.\n\n"


def question(text: str, labels: Sequence[str], instruction: str, method: Method) -> str:
    """Word the whole user turn that asks for one label of ``text``."""
    return question_head(labels, instruction, method) + text.strip()
