"""Words that an answer must not have, as the tokens that would make them."""

from collections.abc import Sequence

from moesaic.services.gateway.language import Language
from moesaic.v1.attention_pb2 import Word


async def bad_words_of(language: Language, words: Sequence[str] | None) -> list[Word]:
    """Encode each word as it begins a text and, where that takes other tokens, as it follows a space."""
    if not words:
        return []
    return await language.work(sum(map(len, words)), _encode, language, words)


def _encode(language: Language, words: Sequence[str]) -> list[Word]:
    encode = language.tokenizer.encode
    ways = [way for word in words for way in (word, f" {word.lstrip()}")]
    found = dict.fromkeys(tuple(encode(way, add_special_tokens=False)) for way in ways)
    return [Word(token_ids=token_ids) for token_ids in found if token_ids]
