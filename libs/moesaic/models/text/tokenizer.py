"""Text to token ids and back. Needs no torch."""

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import tokenizers

from moesaic.errors import CheckpointError, MoesaicError
from moesaic.models.configuration.strict_json import parse_object
from moesaic.models.configuration.tokenizer_files import TokenizerFiles

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character that Unicode keeps for use within a process: in no text that is sent from one to another.
_SEAM = "\ufdd0"
_ROLE_TOKEN = re.compile(r"<[|\uff5c].+[|\uff5c]>")  # as families write them, special or not
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
# The table of ``transformers`` for ``clean_up_tokenization_spaces``.
_SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
_CLEAN = tuple((spaced, spaced.strip()) for spaced in _SPACED)
_LONGEST_SPACED = max(map(len, _SPACED))


class TextTooLong(MoesaicError):
    """A text is longer than its caller can use; ``size`` says how long it is."""

    code = "context_length_exceeded"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, size: str, most: int) -> None:
        self.size, self.most = size, most
        super().__init__(f"the text has {size}, at most {most} tokens are taken")


class Tokenizer:
    """The tokenizer of one model directory. Safe to use from several threads.

    Encoding a long text takes milliseconds and releases the GIL: on an event loop, call it in a
    thread.

    Attributes:
        added_ids: tokens beside those of the vocabulary proper, by their texts.
        special_token_ids: tokens that the texts of answers leave out.
        controls: texts of the tokens that open and end turns: special ones, and others of the form ``<|...|>``. The
            other added tokens, such as ``</think>``, are markup, which templates look for in messages.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special: Mapping[str, str],
        added: Sequence[tokenizers.AddedToken] = (),
        *,
        cleans_up_spaces: bool = False,
    ) -> None:
        """Take the parts, which ``load`` reads.

        Args:
            tokenizer: tokenizer of ``tokenizer.json``.
            special: texts of special tokens, such as ``eos_token``.
            added: tokens that other files add, or to which they give other flags.
            cleans_up_spaces: decoding removes spaces before punctuation and English contractions.
        """
        self._tokenizer = tokenizer
        self.cleans_up_spaces = cleans_up_spaces
        before = tokenizer.get_added_tokens_decoder()
        tokenizer.add_tokens(list(added))
        self.eos_token, self.bos_token, self.pad_token = (
            special.get(name) for name in ("eos_token", "bos_token", "pad_token")
        )
        every = tokenizer.get_added_tokens_decoder()
        self.added_ids = {token.content: i for i, token in every.items()}
        # The library skips every token that was ever special, but not in a spelling that its normalizer changed.
        once = {t.content for tokens in (before, every) for t in tokens.values() if t.special}
        self.special_token_ids = frozenset(i for i in every if tokenizer.id_to_token(i) in once)
        self.controls = frozenset(
            token.content
            for token in every.values()
            if token.content in once or _ROLE_TOKEN.fullmatch(token.content)
        )
        self._openings: dict[str, list[str]] = {}  # controls by their first two characters
        for control in sorted(self.controls):
            # One character cannot be parted.
            if len(control) > 1:
                self._openings.setdefault(control[:2], []).append(control)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read ``tokenizer.json`` and the files beside it, as ``transformers`` does.

        Raises:
            CheckpointError: no ``tokenizer.json``, or one of the files is invalid.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(str(path), "no such file; only fast tokenizers are supported")
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise CheckpointError.unreadable(path.name, error) from error
        # Parsed strictly, since the library silently takes the last of two tokens with one text.
        base = parse_object(raw, path.name)
        files = TokenizerFiles.read(directory, base)
        if files.base is not base:
            raw = json.dumps(files.base).encode()
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(path.name, f"is not a valid tokenizer: {error}") from error
        # Files may keep what training used.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = files.split_special_tokens
        added = [tokenizers.AddedToken(token.content, **token.flags) for token in files.added]
        return cls(tokenizer, files.named, added, cleans_up_spaces=files.cleans_up_spaces)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        """The id of ``eos_token``, if the model has one."""
        return self._id_of(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        """The id of ``pad_token``, if the model has one."""
        return self._id_of(self.pad_token)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary spells it."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """Encode ``text``; control tokens written in it are taken as such.

        Raises:
            TextTooLong: it has more than ``most`` tokens. A text of so many characters that it must have more is not
                looked at.
        """
        if most is not None and len(text) > most * self.longest_token:
            raise TextTooLong(f"{len(text)} characters", most)
        return self._ids([text], add_special_tokens, most)

    def encode_parted(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """Encode a text with ``parted`` texts in it, whose control tokens are plain text.

        Raises:
            TextTooLong: the same as of ``encode``.
        """
        if _SEAM not in text:
            return self.encode(text, add_special_tokens, most)
        if most is not None and len(text) > 2 * most * self.longest_token:
            raise TextTooLong(f"{len(text)} characters", most)
        return self._ids(text.split(_SEAM), add_special_tokens, most)

    def parted(self, text: str) -> str:
        """Put a seam into every control token that ``text`` spells.

        ``encode_parted`` takes either side of a seam by itself, so that no control token is left and every character
        stays. Nothing that a template does with a text removes a seam. A text without such tokens stays as it is.
        """
        if _SEAM in text:
            text = text.replace(_SEAM, _REPLACEMENT)
        for opening, controls in self._openings.items():
            if opening in text:
                for control in controls:
                    # Again where one overlaps itself.
                    while control in text:
                        text = text.replace(control, f"{control[0]}{_SEAM}{control[1:]}")
        return text

    def _ids(self, pieces: list[str], add_special_tokens: bool, most: int | None) -> list[int]:
        # Encoding one by one holds the GIL; this lets it go, and does not work out where each token stands.
        encoded = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        num_tokens = sum(map(len, encoded))
        if most is not None and num_tokens > most:
            raise TextTooLong(f"{num_tokens} tokens", most)
        ids = [token_id for piece in encoded for token_id in piece.ids]
        if not add_special_tokens:
            return ids
        first, framed = encoded[0].ids, self._tokenizer.post_process(encoded[0]).ids
        at = _find(first, framed)
        return [*framed[:at], *ids, *framed[at + len(first) :]]

    @functools.cached_property
    def num_before(self) -> int:
        """The number of special tokens that are put before a text."""
        encoded = self._tokenizer.encode("a", add_special_tokens=False)
        return _find(encoded.ids, self._tokenizer.post_process(encoded).ids)

    def offsets(
        self, text: str, token_ids: Sequence[int], add_special_tokens: bool
    ) -> list[int] | None:
        """Find the character at which each token of a text begins; None if these are not its tokens."""
        # Encoding one by one holds the GIL; this lets it go.
        [encoded] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        if encoded.ids != list(token_ids):
            return None
        return [start for start, _ in encoded.offsets]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ``token_ids``; ids outside the vocabulary have no text."""
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))
        return self._cleaned(text)

    def decode_long(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode as ``decode`` does; it takes longer, but without the GIL."""
        many = self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return self._cleaned(str(many[0]))

    def token_to_id(self, token: str) -> int | None:
        """Look up one token, given as the vocabulary spells it."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of one token."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def _cleaned(self, text: str) -> str:
        if self.cleans_up_spaces:
            for spaced, clean in _CLEAN:
                text = text.replace(spaced, clean)
        return text

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.token_to_id(token)


def _find(part: list[int], whole: list[int]) -> int:
    return next(i for i in range(len(whole) + 1) if whole[i : i + len(part)] == part)


class StreamDecoder:
    """Turns the token ids of one growing sequence into pieces of text that can be shown at once.

    The pieces and what ``flush`` returns, joined, equal ``decode`` of all ids, and no piece ends in
    the middle of a character. Text is held back while more ids could still change it: after an
    incomplete UTF-8 sequence, and within a run of single-byte tokens, which decodes as a whole.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        kept: Collection[str] = (),
    ) -> None:
        """Start an empty sequence; special tokens with the texts ``kept`` are not skipped."""
        self._tokenizer = tokenizer
        shown = {tokenizer.added_ids.get(text) for text in kept}
        # What the decoder skips is told to it only as all or none.
        keeps = skip_special_tokens and not shown.isdisjoint(tokenizer.special_token_ids)
        self._left_out = tokenizer.special_token_ids - shown if keeps else frozenset()
        self._skip_special_tokens = skip_special_tokens and not keeps
        self._window: list[int] = []  # the ids shown last, for context, then those not shown yet
        self._num_shown = 0  # ids of the window whose text was given out
        self._shown_text = ""  # the text of those, decoded by themselves

    def feed(self, token_ids: Sequence[int]) -> str:
        """Append ``token_ids`` and return the text that is now certain, which may be empty."""
        if self._left_out:
            token_ids = [token_id for token_id in token_ids if token_id not in self._left_out]
        self._window += token_ids
        text = self._decode(self._window)
        if (
            text.endswith(_REPLACEMENT)
            or self._in_byte_run()
            or not text.startswith(self._shown_text)
            or (self._tokenizer.cleans_up_spaces and " " in text[1 - _LONGEST_SPACED :])
        ):
            return ""
        return self._show(text)

    def skips(self, token_id: int) -> bool:
        """Return true for a token that has no text here."""
        if token_id in self._left_out or self._tokenizer.id_to_token(token_id) is None:
            return True
        return self._skip_special_tokens and token_id in self._tokenizer.special_token_ids

    def flush(self) -> str:
        """Return the text held back, at the end of the sequence; incomplete characters show as replacements."""
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
