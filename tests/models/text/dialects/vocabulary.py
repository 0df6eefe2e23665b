"""A vocabulary with the markers of a family, and random answers by grammars."""

import random
import re
from pathlib import Path

import tokenizers

from moesaic.engine.sequences.grammar_trial import compiled, load_tokenizer
from moesaic.models.text.dialects.dialect import Wanted
from moesaic.models.text.dialects.functions import ToolFunction
from tests.models.text.dialects.examples import dialect

DEMO = Path(__file__).parents[4] / "models/demo/tokenizer.json"
END = 2
MOST = 200  # tokens
TAGGED = ("<function", "</function", "<parameter", "</parameter", "<invoke", "</invoke")


class Vocabulary:
    """The demo model's tokens, and those markers of a family that are tokens."""

    def __init__(self, path: Path, markers: tuple[str, ...]) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(DEMO))
        added = [tokenizers.AddedToken(m, special=i % 2 == 0) for i, m in enumerate(markers)]
        self.tokenizer.add_tokens(added)
        self.tokenizer.save(str(path))
        self.size = self.tokenizer.get_vocab_size()
        self.known = load_tokenizer(path, self.size, [END])
        self.markers = markers

    def token_id(self, text: str) -> int | None:
        found: int | None = self.tokenizer.token_to_id(text) if text in self.markers else None
        return found

    def spoken(self, grammar: str, rng: random.Random) -> str | None:
        """Draw an answer that the grammar allows; None: it takes too many tokens."""
        matcher = compiled(self.known, "grammar", grammar)
        taken: list[int] = []
        while not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            bits = f"{int.from_bytes(mask, 'little'):b}"[::-1][: self.size]
            allowed = [found.start() for found in re.finditer("1", bits)]
            rare = [i for i in allowed if i == END or i >= 4096]
            token = rng.choice(rare if rare and rng.random() < 0.3 else allowed)
            if token == END:
                break
            matcher.consume_token(token)
            taken.append(token)
            if len(taken) == MOST:
                return None
        return str(self.tokenizer.decode(taken, skip_special_tokens=False))

    def takes(self, grammar: str, text: str) -> bool:
        """True if the grammar allows the text as a complete answer."""
        matcher = compiled(self.known, "grammar", grammar)
        for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
            mask = matcher.compute_bitmask()
            if not mask[token >> 3] >> (token & 7) & 1:
                return False
            matcher.consume_token(token)
        return bool(matcher.compute_bitmask()[END >> 3] >> (END & 7) & 1)


class Vocabularies:
    """A vocabulary for each form."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, dict[str, Vocabulary]()

    def of(self, form: str) -> Vocabulary:
        if form not in self._made:
            markers = dialect(form).markers(Wanted((ToolFunction("f"),)))
            tokens = tuple(m for m in markers if not m.startswith(TAGGED))
            self._made[form] = Vocabulary(self._folder / f"{form}.json", tokens)
        return self._made[form]
