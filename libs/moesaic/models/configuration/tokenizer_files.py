"""The files of a tokenizer, united as in ``transformers``: special tokens, and additions to ``tokenizer.json``.

Needs neither torch nor the tokenizer itself.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from moesaic.errors import CheckpointError
from moesaic.models.configuration.fields import read_json
from moesaic.models.configuration.strict_json import shown
from moesaic.models.configuration.tokenizer_classes import TokenizerClass, class_of

BASE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
ADDED = "added_tokens.json"
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = frozenset(("single_word", "lstrip", "rstrip", "normalized", "special"))
_MORE = "extra_special_tokens"
_MORE_OF_OLD = "additional_special_tokens"
_CLEANS = "clean_up_tokenization_spaces"
_CLEANS_BPE = f"{_CLEANS}_for_bpe_even_though_it_will_corrupt_output"


class AddedText(NamedTuple):
    """A token beside the vocabulary, with the flags in its file."""

    content: str
    flags: Mapping[str, bool]

    def as_special(self) -> "AddedText":
        """Return it as a special token."""
        return AddedText(self.content, {**self.flags, "special": True})


@dataclass(frozen=True)
class TokenizerFiles:
    """The special tokens of a model directory, and the tokens that ``tokenizer.json`` lacks or has with other flags."""

    base: Mapping[str, Any]  # tokenizer.json; empty if there is none
    named: Mapping[str, str] = field(default_factory=dict)  # texts of ``eos_token`` and the like
    added: tuple[AddedText, ...] = ()  # in the order in which they get their ids
    split_special_tokens: bool = False  # special tokens in a text are encoded as plain text
    cleans_up_spaces: bool = False  # decoded texts lose spaces before full stops and the like

    @classmethod
    def read(cls, directory: Path, base: Mapping[str, Any] | None = None) -> "TokenizerFiles":
        """Read the existing files; ``base`` is ``tokenizer.json`` if it has been read already.

        Raises:
            CheckpointError: one of them is not valid.
        """
        if base is None:
            base = _read_if_there(directory / BASE)
        told = _Told.read(directory, base)
        by_id = told.by_id
        if by_id is None:
            special = {token.content for token in (*told.named.values(), *told.more)}
            by_id = _of_added_file(_read_if_there(directory / ADDED), special) | _of_base(base)
        if told.kind is not None:
            base = told.kind.applied(base, told.values)
        every = [by_id[token_id] for token_id in sorted(by_id)]
        known = {token.content for token in (*_of_base(base).values(), *every)}
        special_ones = (*told.named.values(), *told.more)
        every += [token for token in special_ones if token.content not in known]
        if told.kind is not None and told.kind.renews_special:
            every += [AddedText(token.content, {"special": True}) for token in special_ones]
        model = base.get("model")
        is_bpe = isinstance(model, dict) and model.get("type") == "BPE"
        names = {token.content for token in told.named.values()}
        return cls(
            base,
            {name: token.content for name, token in told.named.items()},
            tuple(
                token.as_special() if token.content in names else token
                for token in every
                if token.content
            ),
            _flag(told.values, "split_special_tokens"),
            _flag(told.values, _CLEANS) and (not is_bpe or _flag(told.values, _CLEANS_BPE)),
        )

    def ids(self) -> dict[str, int]:
        """Find the id of every token. An added token that the vocabulary lacks has the next free id."""
        found = _vocabulary(self.base)
        size = len(found)
        added = {token.content: token_id for token_id, token in _of_base(self.base).items()}
        found |= added
        most = max(added.values(), default=-1)
        for token in self.added:
            token_id = found.setdefault(token.content, max(size, most + 1))
            most = max(most, token_id)
        return found

    def united(self, vocab_size: int, special_ids: Iterable[int]) -> str:
        """Return ``tokenizer.json`` with all added tokens; those with the given ids are special."""
        ids = self.ids()
        tokens = {**_of_base(self.base), **{ids[token.content]: token for token in self.added}}
        texts = {token_id: text for text, token_id in ids.items()}
        for token_id in special_ids:
            token = tokens.get(token_id, AddedText(texts[token_id], {}))
            tokens[token_id] = token.as_special()
        added = [_entry(tokens[token_id], token_id) for token_id in sorted(tokens)]
        added = [entry for entry in added if entry["id"] < vocab_size]
        return json.dumps({**self.base, "added_tokens": added})


def _entry(token: AddedText, token_id: int) -> dict[str, Any]:
    defaults = dict.fromkeys(sorted(_FLAGS), False)
    defaults["normalized"] = not token.flags.get("special", False)
    return {"id": token_id, "content": token.content, **defaults, **token.flags}


def read_special_tokens(directory: Path, *, of_class: bool = True) -> dict[str, str]:
    """Read the texts of ``bos_token``, ``eos_token`` and the like.

    Args:
        directory: directory of the model.
        of_class: with the class's defaults for names that are in no file.

    Raises:
        CheckpointError: a file of the tokenizer is not valid.
    """
    told = _Told.read(directory, _read_if_there(directory / BASE) if of_class else {})
    return {name: token.content for name, token in told.named.items()}


class _Told(NamedTuple):
    """Content of the files beside ``tokenizer.json``."""

    named: Mapping[str, AddedText]
    more: Sequence[AddedText]
    by_id: Mapping[int, AddedText] | None
    kind: TokenizerClass | None
    values: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path, base: Mapping[str, Any]) -> "_Told":
        """Read them. ``special_tokens_map.json`` overrides the others, unless there is an ``added_tokens_decoder``."""
        values = _read_if_there(directory / CONFIG)
        kind = class_of(base, values, _read_if_there(directory / "config.json"))
        if kind is not None:
            values = {**kind.named, **values}
        if values.get(_MORE_OF_OLD) and not values.get(_MORE):
            values[_MORE] = values.pop(_MORE_OF_OLD)
        # As in transformers, tokens with flags and tokens of the map get their ids first.
        flagged = _own_names(values, flagged=True)
        plain = _own_names(values, flagged=False) | _by_name(CONFIG, _MORE, values)
        plain = plain or _by_name(CONFIG, "model_specific_special_tokens", values)
        by_id = None
        if "added_tokens_decoder" in values:
            by_id = _by_id(values["added_tokens_decoder"])
        else:
            told = _read_if_there(directory / SPECIAL)
            flagged |= _take_map(values, told)
            plain |= _by_name(SPECIAL, _MORE, told)
        own = {**flagged, **plain}
        return cls({**_named(values), **own}, _more(values), by_id, kind, values)


def _vocabulary(base: Mapping[str, Any]) -> dict[str, int]:
    """Read the ids of tokens. A damaged file may lack some: the tokenizer itself refuses it."""
    model = base.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        # Unigram has a list of tokens with scores
        pieces = (entry[0] if isinstance(entry, list) and entry else None for entry in vocabulary)
        return {piece: i for i, piece in enumerate(pieces) if isinstance(piece, str)}
    if not isinstance(vocabulary, dict):
        return {}
    return {text: i for text, i in vocabulary.items() if type(i) is int}


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _of_base(base: Mapping[str, Any]) -> dict[int, AddedText]:
    added = base.get("added_tokens")
    return {
        token["id"]: _token(BASE, f"added_tokens[{number}]", token)
        for number, token in enumerate(added if isinstance(added, list) else ())
        if isinstance(token, dict) and type(token.get("id")) is int
    }


def _by_id(decoder: Any) -> dict[int, AddedText]:
    name = "added_tokens_decoder"
    if not isinstance(decoder, dict):
        raise CheckpointError(CONFIG, f"{name}: expected an object, got {shown(decoder)}")
    for token_id in decoder:
        if not token_id.isdecimal():
            raise CheckpointError(CONFIG, f"{name}: expected token ids, got {shown(token_id)}")
    return {
        int(token_id): _token(CONFIG, f"{name}.{token_id}", value, texts=False)
        for token_id, value in decoder.items()
    }


def _of_added_file(ids: Mapping[str, Any], special: set[str]) -> dict[int, AddedText]:
    for text, token_id in ids.items():
        if type(token_id) is not int:
            raise CheckpointError(ADDED, f"{text}: expected a token id, got {shown(token_id)}")
    return {
        token_id: AddedText(text, {"special": text in special, "normalized": text not in special})
        for text, token_id in ids.items()
    }


def _own_names(values: Mapping[str, Any], *, flagged: bool) -> dict[str, AddedText]:
    """Read the special tokens with custom names: those with flags, or those that are strings."""
    return {
        name: _token(CONFIG, name, value)
        for name, value in values.items()
        if name not in _NAMES and name.endswith("_token")
        if (isinstance(value, dict) and "__type" in value if flagged else isinstance(value, str))
    }


def _take_map(values: dict[str, Any], told: Mapping[str, Any]) -> dict[str, AddedText]:
    """Override ``values`` by ``special_tokens_map.json``.

    Returns:
        Its tokens with custom names.
    """
    own: dict[str, AddedText] = {}
    for name, value in told.items():
        if name in _NAMES:
            token = None if value is None else _token(SPECIAL, name, value).as_special()
            values[name] = token and {"content": token.content, **token.flags}
        elif name == _MORE and isinstance(value, list):
            given = values.get(name)
            before: list[Any] = given if isinstance(given, list) else []
            values[name] = [*before, *(each for each in value if each not in before)]
        elif name.endswith("_token") and isinstance(value, str | dict):
            own[name] = _token(SPECIAL, name, value).as_special()
        elif name != _MORE:
            values.setdefault(name, value)
    return own


def _by_name(file: str, name: str, values: Mapping[str, Any]) -> dict[str, AddedText]:
    """Read the special tokens by their names, if the value of ``name`` is an object."""
    more = values.get(name)
    if not isinstance(more, dict):
        return {}
    return {each: _token(file, f"{name}.{each}", more[each]) for each in more}


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if value is not None and type(value) is not bool:
        raise CheckpointError(CONFIG, f"{name}: expected true or false, got {shown(value)}")
    return bool(value)


def _named(values: Mapping[str, Any]) -> dict[str, AddedText]:
    """Read the special tokens that have one of the usual names."""
    return {
        name: _token(CONFIG, name, values[name]) for name in _NAMES if values.get(name) is not None
    }


def _more(values: Mapping[str, Any]) -> list[AddedText]:
    """Read the special tokens that have no name."""
    name = _MORE_OF_OLD if isinstance(values.get(_MORE, {}), dict) else _MORE
    more = values.get(name) or []
    if not isinstance(more, list):
        raise CheckpointError(CONFIG, f"{name}: expected a list of tokens, got {shown(more)}")
    return [_token(CONFIG, f"{name}[{number}]", value) for number, value in enumerate(more)]


def _token(file: str, path: str, value: Any, *, texts: bool = True) -> AddedText:
    """Read one token: a text, which is special, or an object with its flags."""
    if texts and isinstance(value, str):
        return AddedText(value, {"special": True})
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str):
        expected = "a text, or an object with content" if texts else "an object with content"
        raise CheckpointError(file, f"{path}: expected {expected}, got {shown(value)}")
    flags = {name: flag for name, flag in value.items() if name not in ("content", "__type", "id")}
    for name, flag in flags.items():
        if name not in _FLAGS or type(flag) is not bool:
            known = ", ".join(sorted(_FLAGS))
            raise CheckpointError(
                file, f"{path}.{name}: expected true or false for one of {known}, got {shown(flag)}"
            )
    return AddedText(content, flags)
