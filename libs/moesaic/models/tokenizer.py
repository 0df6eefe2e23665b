"""Text to token ids and back. Needs no torch."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from moesaic.errors import CheckpointError
from moesaic.models.fields import read_json

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """The tokenizer of one model directory. Safe to use from several threads.

    Encoding a long text takes milliseconds and releases the GIL: on an event loop, call it in a
        thread.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, special: dict[str, str]) -> None:
        """Take the parts; ``load`` reads them. ``special`` has the texts of ``eos_token`` and the like."""
        self._tokenizer = tokenizer
        self.eos_token, self.bos_token, self.pad_token = (
            special.get(name) for name in ("eos_token", "bos_token", "pad_token")
        )
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        # What a text must not hold if none of its tokens shall be special; the longest first.
        texts = {token.content for token in added.values() if token.special}
        self.special_texts = tuple(sorted(texts, key=lambda text: (-len(text), text)))

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read ``tokenizer.json`` and, where there is one, ``tokenizer_config.json``.

        Raises:
            CheckpointError: no ``tokenizer.json``, or one of the files is invalid.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(str(path), "no such file; only fast tokenizers are supported")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(path.name, f"is not a valid tokenizer: {error}") from error
        tokenizer.no_padding()  # files may keep what training used
        tokenizer.no_truncation()
        return cls(tokenizer, read_special_tokens(directory))

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        """The id of ``eos_token``, if the model has one."""
        return self._id_of(self.eos_token)

    @property
    def bos_token_id(self) -> int | None:
        """The id of ``bos_token``, if the model has one."""
        return self._id_of(self.bos_token)

    @property
    def pad_token_id(self) -> int | None:
        """The id of ``pad_token``, if the model has one."""
        return self._id_of(self.pad_token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of ``text``; special tokens written in it are taken as such."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``; ids outside the vocabulary have none."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str) -> int | None:
        """The id of one token, given as the vocabulary spells it."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of one token."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.token_to_id(token)


class StreamDecoder:
    """Turns the token ids of one growing sequence into pieces of text that can be shown at once.

    The pieces and what ``flush`` returns, joined, equal ``decode`` of all ids, and no piece ends in
    the middle of a character. Text is held back while more ids could still change it: after an
    incomplete UTF-8 sequence, and within a run of single-byte tokens, which decodes as a whole.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        """Start an empty sequence."""
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._window: list[int] = []  # the ids shown last, for context, then those not shown yet
        self._num_shown = 0  # ids of the window whose text was given out
        self._shown_text = ""  # the text of those, decoded by themselves

    def feed(self, token_ids: Sequence[int]) -> str:
        """Append ``token_ids`` and return the text that is now certain, which may be empty."""
        self._window += token_ids
        text = self._decode(self._window)
        if (
            text.endswith(_REPLACEMENT)
            or self._in_byte_run()
            or not text.startswith(self._shown_text)
        ):
            return ""
        return self._show(text)

    def flush(self) -> str:
        """The text held back, at the end of the sequence; incomplete characters show as replacements."""
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        piece = text[len(self._shown_text) :]
        if not piece:
            return ""
        # Decoders may treat a sequence's beginning apart (drop its first space), so the ids shown
        # last stay as context. They serve only if they have text of their own: then nothing that
        # follows them is at the beginning.
        context = self._window[self._num_shown :]
        context_text = self._decode(context)
        if context_text:
            self._window, self._shown_text = context, context_text
        else:
            self._shown_text = text
        self._num_shown = len(self._window)
        return piece

    def _in_byte_run(self) -> bool:
        special = self._tokenizer.special_token_ids if self._skip_special_tokens else frozenset()
        for token_id in reversed(self._window):
            token = self._tokenizer.id_to_token(token_id)
            if token is not None and token_id not in special:
                return _BYTE_TOKEN.fullmatch(token) is not None
        return False

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)


def read_special_tokens(directory: Path) -> dict[str, str]:
    """The texts of ``bos_token``, ``eos_token`` and the like in ``tokenizer_config.json``, where
    there are any.

    Raises:
        CheckpointError: the file is not valid JSON.
    """
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    return {
        name: text
        for name, value in config.items()
        if name.endswith("_token") and (text := _token_text(value)) is not None
    }


def _token_text(value: Any) -> str | None:
    text = (
        value.get("content") if isinstance(value, dict) else value
    )  # older files keep flags beside it
    return text if isinstance(text, str) else None
