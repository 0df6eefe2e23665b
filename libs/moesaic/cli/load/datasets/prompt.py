"""One prompt of a load."""

from dataclasses import dataclass

Content = str | list[int] | list[str] | list[list[int]]


@dataclass(frozen=True)
class LoadPrompt:
    """One prompt of a load.

    Attributes:
        content: text, or ids of tokens; several of either for one request of embeddings.
        prompt_tokens: its tokens as far as they are known; the server's count wins.
        answer_tokens: longest answer.
        due_s: when it is sent, in seconds; None: the rate decides.
        prompts: that are in this one.
    """

    content: Content
    prompt_tokens: int
    answer_tokens: int
    due_s: float | None = None
    prompts: int = 1
