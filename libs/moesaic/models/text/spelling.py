"""Tokens in a text: the bytes of each, and the character at which each begins."""

import functools
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from moesaic.models.text.tokenizer import StreamDecoder, Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenPlace(NamedTuple):
    """The place of a token in a text."""

    offset: int  # in characters; a token within a character has that character's
    first: bool  # true: the token is spelled as at the beginning of a text


class Spelling:
    """The bytes of each token. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._context = self._find_context()

    @functools.cache  # noqa: B019  # as long as the process; there are at most twice as many entries as tokens
    def of(self, token_id: int, first: bool) -> bytes:
        """Spell one token in the middle of a text, or as the ``first`` of one, which may lose a blank.

        The bytes of an answer's tokens, joined, are its text in UTF-8. Special tokens are not in the text; their bytes
        are those of their names.
        """
        text = self._decode([token_id]) if first else self._after_context(token_id)
        return text.encode() if _REPLACEMENT not in text else self._bytes_of(token_id, text)

    def _bytes_of(self, token_id: int, text: str) -> bytes:
        """Spell a token that has a part of a character."""
        token = self.tokenizer.id_to_token(token_id) or ""
        if one := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(one[1])
        table = _byte_characters()
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return text.encode()

    def _after_context(self, token_id: int) -> str:
        context, before = self._context
        return self._decode([*context, token_id])[len(before) :]

    def _find_context(self) -> tuple[list[int], str]:
        """Find a token with the same text at every place, to put it before others."""
        for token_id in range(self.tokenizer.vocab_size):
            text = self._decode([token_id])
            if text.isascii() and text.isalnum() and self._decode([token_id] * 2) == text * 2:
                return [token_id], text
        return [], ""

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


class SpelledText:
    """The tokens of a growing text, such as an answer."""

    def __init__(self, spelling: Spelling, decoder: StreamDecoder, offset: int = 0) -> None:
        """Begin a text that is at ``offset`` characters in another one."""
        self._spelling, self._decoder = spelling, decoder
        self._offset, self._held, self._first = offset, b"", True

    def place(self, token_id: int) -> TokenPlace:
        """Take the next token."""
        first = self._first
        spelled = self._spelling.of(token_id, first)
        skipped = self._decoder.skips(token_id)
        # Invalid bytes are decoded as replacement characters. A continuation byte belongs to its character.
        seen = self._held + (spelled[:1] or b" ")
        offset = self._offset + len(seen.decode(errors="replace")) - 1
        if text := self._decoder.feed([token_id]):
            self._offset, self._held = self._offset + len(text), b""
            own = spelled.decode(errors="replace")
            if own and text.endswith(own):
                # Decoders differ in the number of replacement characters.
                offset = self._offset - len(own)
        elif not skipped:
            self._held += spelled
        self._first = first and skipped
        return TokenPlace(offset, first)


class SpelledPrompt:
    """The tokens of a known text, such as a prompt."""

    def __init__(
        self, spelling: Spelling, token_ids: Sequence[int], text: str, *, framed: bool = False
    ) -> None:
        """Find each token in the text. With ``framed``, the tokens of the tokenizer's template are not in it."""
        self._spelling, self._text = spelling, text.encode()
        self._at = self._offset = 0
        tokenizer = spelling.tokenizer
        num_before = tokenizer.num_before if framed else 0
        before = [TokenPlace(0, False)] * num_before
        found = [self._next(token_id) for token_id in token_ids[num_before:]]
        places = [*before, *(place for place, _ in found)]
        if not all(known for _, known in found):
            # The tokenizer may have normalized the text; its offsets take that into account.
            offsets = tokenizer.offsets(text, token_ids, add_special_tokens=framed)
            if offsets is not None:
                firsts = (place.first for place in places)
                places = [
                    TokenPlace(*each) for each in zip(accumulate(offsets, max), firsts, strict=True)
                ]
            else:
                # The text was decoded from the tokens, with replacement characters for invalid bytes.
                decoder = StreamDecoder(tokenizer, skip_special_tokens=False)
                answer = SpelledText(spelling, decoder)
                places = [answer.place(token_id) for token_id in token_ids]
        self._places = iter(places)

    def place(self, token_id: int) -> TokenPlace:
        """Take the next token."""
        return next(self._places)

    def _next(self, token_id: int) -> tuple[TokenPlace, bool]:
        """Find the place of the next token; also true if the token is known."""
        at = self._at
        offset = self._offset - _continues(self._text[at : at + 1])
        middle, start = (self._spelling.of(token_id, first) for first in (False, True))
        # The tokenizer may have put a blank before a token, at the beginning of a text or after a special token.
        for spelled, first in ((middle, False), (start, True), (middle.removeprefix(b" "), False)):
            if self._text.startswith(spelled, at):
                self._at += len(spelled)
                self._offset += _num_characters(spelled)
                return TokenPlace(offset, first), True
        return TokenPlace(offset, False), at == len(self._text)


def _num_characters(text: bytes) -> int:
    """Count the characters that begin in a text."""
    return sum(byte & 0xC0 != 0x80 for byte in text)


def _continues(byte: bytes) -> bool:
    """Return true for a byte that is not the first of its character."""
    return b"\x80" <= byte < b"\xc0"


@functools.cache
def _byte_characters() -> dict[str, int]:
    """Make the table of byte-level vocabularies: printable bytes are themselves, the others are numbered from 256."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    table = {chr(byte): byte for byte in printed}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
