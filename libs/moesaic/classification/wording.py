"""The words of every prompt that a question is put with: data with a version.

Accuracy depends on the exact words, so a model may bring its own (``wording`` in its
``moesaic.json``), and every answer tells the version of those it was asked with.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from moesaic.errors import CheckpointError

# What each template must have, each once. Siblings differ in what follows the bar only. Where all before it comes
# first, as it does in the packaged words, that is their common prefix, and is computed once; a model that was trained
# on another order may have its own.
SLOTS = {
    "token": "instruction labels text",
    "choice": "instruction options text",
    "sequence": "instruction labels text",
    "multi": "instruction text | label",
    "predicate": "input | instructions",
    "decide": "input | instructions labels",
    "decide_by_letter": "input | instructions options",
    "decide_by_number": "input | instructions options",
    "relevance": "instruction query | document",
}
WORDS = ("instruction", "yes", "no", "tail", "relevance")
_SLOT = re.compile(r"\{(\w*)\}")
MAX_VERSION_CHARS = 64


@dataclass(frozen=True)
class Wording:
    """The words for one model.

    Attributes:
        version: what answers report: the author's name for it, and a digest, which changes with every word.
        words: ``instruction`` and ``relevance``, the task where a caller names none; ``yes`` and ``no``; ``tail``, what
            a question ends with where the model has no chat template.
        templates: a prompt for each way to ask, with slots in braces.
    """

    version: str
    words: Mapping[str, str]
    templates: Mapping[str, str]

    def render(self, template: str, **values: str) -> str:
        """Fill a template's slots; braces in the values are text."""
        return _filled(self.templates[template], values)

    def head(self, template: str, before: str, **values: str) -> str:
        """Fill what comes before the slot ``before``."""
        start, _, _ = self.templates[template].partition(f"{{{before}}}")
        return _filled(start, values)

    def replaced(self, own: Any, file: str) -> "Wording":
        """These words with some of a model's own in their place.

        Args:
            own: ``{"version": …, "words": {…}, "templates": {…}}`` with only what is different.
            file: where that is from, for errors.

        Raises:
            CheckpointError: it is not that, or a template lacks a slot.
        """
        problem = _problem(own)
        if problem is not None:
            raise CheckpointError(file, f"wording{problem}")
        words = {**self.words, **own.get("words", {})}
        templates = {**self.templates, **own.get("templates", {})}
        return Wording(_version(own["version"], words, templates), words, templates)


def _problem(own: Any) -> str | None:
    """What is wrong with a wording, with the path to it."""
    if not isinstance(own, dict):
        return f": expected an object, got {own!r}"
    version = own.get("version")
    if not isinstance(version, str) or not re.fullmatch(r"[\w.-]+", version, re.ASCII):
        return (
            ".version: expected a name for these words, of letters, digits and . _ -, "
            f"got {version!r}"
        )
    if len(version) > MAX_VERSION_CHARS:
        return f".version: must have at most {MAX_VERSION_CHARS} characters, got {len(version)}"
    for unknown in own.keys() - {"version", "words", "templates"}:
        return f".{unknown}: is not one of version, words, templates"
    for group, known in (("words", WORDS), ("templates", tuple(SLOTS))):
        given = own.get(group, {})
        if not isinstance(given, dict):
            return f".{group}: expected an object, got {given!r}"
        for name, text in given.items():
            if name not in known:
                return f".{group}.{name}: is not one of {', '.join(known)}"
            if not isinstance(text, str) or not text.strip():
                return f".{group}.{name}: expected a text, got {text!r}"
    for name, text in own.get("templates", {}).items():
        if (problem := _slot_problem(text, SLOTS[name])) is not None:
            return f".templates.{name}: {problem}"
    return None


def _slot_problem(template: str, wanted: str) -> str | None:
    slots, found = wanted.replace("|", "").split(), _SLOT.findall(template)
    if sorted(found) == sorted(slots):
        return None
    names = ", ".join(f"{{{name}}}" for name in slots)
    return f"must have {names}, each once, and no other slot; it has {found}"


def _filled(template: str, values: Mapping[str, str]) -> str:
    return _SLOT.sub(lambda slot: values[slot[1]], template)


def _version(name: str, words: Mapping[str, str], templates: Mapping[str, str]) -> str:
    content = json.dumps([words, templates], sort_keys=True).encode()
    return f"{name}+{hashlib.sha256(content).hexdigest()[:8]}"


def _packaged() -> Wording:
    text = resources.files(__package__).joinpath("wording.json").read_text(encoding="utf-8")
    return Wording("", {}, {}).replaced(json.loads(text), "wording.json")


PACKAGED = _packaged()
