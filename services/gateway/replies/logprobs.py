"""Log-probabilities in the two shapes that clients expect."""

from collections.abc import Callable, Sequence

from moesaic.services.gateway.replies.generating import (
    ChatLogprobs,
    ChosenToken,
    CompletionLogprobs,
    PromptLogprobs,
    PromptToken,
    TokenEntry,
)
from moesaic.v1.attention_pb2 import TokenLogprob

LOWEST = -9999.0  # JSON has no minus infinity
TokenText = Callable[[int], str]


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], text_of: TokenText
) -> ChatLogprobs:
    """Shape the log-probabilities of some tokens of a chat's answer."""
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
    """Shape those of some tokens of a completion, which begin ``offset`` characters into its text."""
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


def echoed_logprobs(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprob], text_of: TokenText, num_top: int
) -> CompletionLogprobs:
    """Shape those of a prompt at the beginning of a completion's text; its first token has none."""
    told = [_cut(entry, num_top) for entry in logprobs]
    out = completion_logprobs(prompt[1:], told, text_of, len(first := text_of(prompt[0])))
    return CompletionLogprobs(
        [0, *out.text_offset],
        [None, *out.token_logprobs],
        [first, *out.tokens],
        [None, *out.top_logprobs],
    )


def prompt_logprobs(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprob], text_of: TokenText, num_top: int
) -> PromptLogprobs:
    """Shape those of a prompt as vLLM's ``prompt_logprobs``."""
    out: PromptLogprobs = [None]
    for token_id, whole in zip(prompt[1:], logprobs, strict=True):
        entry = _cut(whole, num_top)
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        told = [(token_id, entry.logprob, entry.rank)]
        told += [(other, logprob, rank) for rank, (other, logprob) in enumerate(top, 1)]
        out.append(
            {
                str(other): PromptToken(max(logprob, LOWEST), rank, text_of(other))
                for other, logprob, rank in reversed(told)  # the actual one's rank counts
            }
        )
    return out


def _cut(entry: TokenLogprob, num_top: int) -> TokenLogprob:
    """Cut the likeliest tokens to ``num_top``: one answer may tell of its prompt in two ways."""
    return TokenLogprob(
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=entry.top_token_ids[:num_top],
        top_logprobs=entry.top_logprobs[:num_top],
    )
