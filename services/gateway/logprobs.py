"""Log-probabilities in the two shapes that clients expect."""

from collections.abc import Callable, Sequence

from moesaic.v1.attention_pb2 import TokenLogprob
from services.gateway.replies import ChatLogprobs, ChosenToken, CompletionLogprobs, TokenEntry

LOWEST = -9999.0  # JSON has no minus infinity
TokenText = Callable[[int], str]


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], text_of: TokenText
) -> ChatLogprobs:
    """Those of some tokens of a chat's answer."""
    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        top = [
            TokenEntry(text := text_of(other), max(logprob, LOWEST), list(text.encode()))
            for other, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        ]
        text = text_of(token_id)
        content.append(ChosenToken(text, max(entry.logprob, LOWEST), list(text.encode()), top))
    return ChatLogprobs(content)


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], text_of: TokenText, offset: int
) -> CompletionLogprobs:
    """Those of some tokens of a completion that begin ``offset`` characters into its text."""
    out = CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        text = text_of(token_id)
        top = {
            text_of(other): max(logprob, LOWEST)
            for other, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        }
        top.setdefault(text, max(entry.logprob, LOWEST))  # the chosen one even if it is unlikely
        out.text_offset.append(offset)
        out.token_logprobs.append(max(entry.logprob, LOWEST))
        out.tokens.append(text)
        out.top_logprobs.append(top)
        offset += len(text)
    return out
