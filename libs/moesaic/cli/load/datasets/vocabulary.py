"""Tokens of a model's vocabulary: as its server tells them, or as a file says."""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from moesaic.cli.terminal.console import say
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    import httpx

NO_ROUTE = (404, 405)
# Words that most vocabularies have as one token each.
WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by"),
    *("on", "not", "he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "an"),
)


class Vocabulary(Protocol):
    """Tokens of a model."""

    name: str | None  # of the tokenizer, in result files

    def tokens(self, text: str) -> list[int]:
        """Turn a text into tokens, without special ones; none: it is unknown how."""
        ...

    def pool(self) -> list[int]:
        """List tokens that random prompts can be drawn from, likewise."""
        ...

    def spelt(self, tokens: list[int]) -> str:
        """Turn tokens into a text."""
        ...


class ServerVocabulary:
    """Asks the server, by ``/tokenize`` and ``/detokenize``."""

    name: str | None = None

    def __init__(self, client: "httpx.Client", model: str) -> None:
        self._client, self._model = client, model
        self._is_unknown = self._has_refused = False

    def tokens(self, text: str) -> list[int]:
        """Turn a text into tokens; none: the server has no such route, or refuses this text."""
        if self._is_unknown:
            return []
        asked = {"model": self._model, "prompt": text, "add_special_tokens": False}
        response = self._client.post("/tokenize", json=asked)
        try:
            found = [int(each) for each in response.json()["tokens"]]
        except (ValueError, KeyError, TypeError):
            found = []
        if response.is_success and found:
            return found
        self._is_unknown = response.status_code in NO_ROUTE
        if text and not (self._is_unknown or self._has_refused):
            self._has_refused = True
            say(f"/tokenize refused a text with {response.status_code}: words of such texts count")
        return []

    def pool(self) -> list[int]:
        """List the tokens of common words."""
        return sorted({*self.tokens(" ".join(WORDS))})

    def spelt(self, tokens: list[int]) -> str:
        """Turn tokens into a text."""
        asked = {"model": self._model, "tokens": tokens}
        response = self._client.post("/detokenize", json=asked)
        response.raise_for_status()
        return str(response.json()["prompt"])


class FileVocabulary:
    """Reads ``tokenizer.json``.

    Raises:
        CommandError: there is no such file.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self.name: str | None = str(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises this class itself
            raise CommandError(f"--tokenizer {file}: {error}", Exit.USAGE) from error

    def tokens(self, text: str) -> list[int]:
        """Turn a text into tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def pool(self) -> list[int]:
        """List all tokens but special ones."""
        added = self._tokenizer.get_added_tokens_decoder()
        return sorted({*self._tokenizer.get_vocab(with_added_tokens=False).values()} - {*added})

    def spelt(self, tokens: list[int]) -> str:
        """Turn tokens into a text."""
        return str(self._tokenizer.decode(tokens))
