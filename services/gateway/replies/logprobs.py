"""Log-probabilities in the shapes that clients expect."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moesaic.models.text.spelling import Spelling, TokenPlace
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


class Text(Protocol):
    """A text whose tokens come one after the other."""

    def place(self, token_id: int) -> TokenPlace:
        """Take the next token."""
        ...


@dataclass(frozen=True)
class TokenNames:
    """The names of tokens. A token with a part of a character is named by its bytes, as in OpenAI's API."""

    spelling: Spelling
    mark: str = ""  # before bytes
    as_ids: bool = False

    def name(self, token_id: int, place: TokenPlace) -> str:
        """Name a token at a place in the text, or an alternative to it."""
        if self.as_ids:
            return f"token_id:{token_id}"
        spelled = self.spell(token_id, place)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return self.mark + spelled.decode(errors="backslashreplace")

    def spell(self, token_id: int, place: TokenPlace) -> bytes:
        """Return the bytes of a token at a place in the text."""
        return self.spelling.of(token_id, place.first)


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], names: TokenNames, text: Text
) -> ChatLogprobs:
    """Shape the log-probabilities of some tokens of a chat's answer, the next ones of its ``text``."""
    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        place = text.place(token_id)
        chosen = _entry(token_id, entry.logprob, names, place)
        others = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        top = [_entry(other, logprob, names, place) for other, logprob in others]
        content.append(ChosenToken(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def _entry(token_id: int, logprob: float, names: TokenNames, place: TokenPlace) -> TokenEntry:
    spelled = list(names.spell(token_id, place))
    return TokenEntry(names.name(token_id, place), max(logprob, LOWEST), spelled)


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], names: TokenNames, text: Text
) -> CompletionLogprobs:
    """Shape those of some tokens of a completion, the next ones of its ``text``."""
    out = CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        place = text.place(token_id)
        top: dict[str, float] = {}
        for other, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
            # The most likely of several tokens with one name comes first, and is kept.
            top.setdefault(names.name(other, place), max(logprob, LOWEST))
        name, logprob = names.name(token_id, place), max(entry.logprob, LOWEST)
        # The chosen token is listed with its own value, even if it is unlikely.
        top[name] = logprob
        out.text_offset.append(place.offset)
        out.token_logprobs.append(logprob)
        out.tokens.append(name)
        out.top_logprobs.append(top)
    return out


def echoed_logprobs(
    prompt: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    names: TokenNames,
    text: Text,
    num_top: int,
) -> CompletionLogprobs:
    """Shape those of a prompt at the beginning of a completion's text; its first token has none."""
    place = text.place(prompt[0])
    out = completion_logprobs(prompt[1:], [_cut(entry, num_top) for entry in logprobs], names, text)
    return CompletionLogprobs(
        [place.offset, *out.text_offset],
        [None, *out.token_logprobs],
        [names.name(prompt[0], place), *out.tokens],
        [None, *out.top_logprobs],
    )


def prompt_logprobs(
    prompt: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    names: TokenNames,
    text: Text,
    num_top: int,
) -> PromptLogprobs:
    """Shape those of a prompt as vLLM's ``prompt_logprobs``."""
    out: PromptLogprobs = [None]
    text.place(prompt[0])
    for token_id, whole in zip(prompt[1:], logprobs, strict=True):
        entry, place = _cut(whole, num_top), text.place(token_id)
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        told = [(token_id, entry.logprob, entry.rank)]
        told += [(other, logprob, rank) for rank, (other, logprob) in enumerate(top, 1)]
        out.append(
            {
                str(other): PromptToken(max(logprob, LOWEST), rank, names.name(other, place))
                # Reversed, since the prompt's own token comes first and must keep its rank.
                for other, logprob, rank in reversed(told)
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
