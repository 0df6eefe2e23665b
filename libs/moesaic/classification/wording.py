"""The words of all prompts that ask questions: versioned data.

Accuracy depends on the exact words. So a model may bring its own (``wording`` in its ``moesaic.json``), and every
answer names the version of its question's words.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from moesaic.errors import CheckpointError

# Placeholders of each template, each once. Siblings differ only in those behind the bar. Where all before the bar come
# first, as in the packaged words, they are the siblings' common prefix, which is computed once; a model that was
# trained on another order may have its own.
PLACEHOLDERS = {
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
_PLACEHOLDER = re.compile(r"\{(\w*)\}")
MAX_VERSION_CHARS = 64


@dataclass(frozen=True)
class Wording:
    """The words for one model.

    Attributes:
        version: the author's name for the words, and a digest, which changes with every word; answers report it.
        words: ``instruction`` and ``relevance``, the task where a caller names none; ``yes`` and ``no``; ``tail``, the
            end of a question where the model has no chat template.
        templates: a prompt for each way to ask, with placeholders in braces.
    """

    version: str
    words: Mapping[str, str]
    templates: Mapping[str, str]

    def render(self, template: str, **values: str) -> str:
        """Fill a template's placeholders; braces in the values are text."""
        return _PLACEHOLDER.sub(lambda found: values[found[1]], self.templates[template])

    def replaced(self, own: Any, file: str) -> "Wording":
        """Put some of a model's own words in the place of these.

        Args:
            own: ``{"version": …, "words": {…}, "templates": {…}}``, only those that differ.
            file: the file of ``own``, for errors.

        Raises:
            CheckpointError: ``own`` has another form, or a template lacks a placeholder.
        """
        problem = _problem(own)
        if problem is not None:
            raise CheckpointError(file, f"wording{problem}")
        words = {**self.words, **own.get("words", {})}
        templates = {**self.templates, **own.get("templates", {})}
        return Wording(_version(own["version"], words, templates), words, templates)


def _problem(own: Any) -> str | None:
    """Find the first fault of a wording, with the path to it."""
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
    for group, known in (("words", WORDS), ("templates", tuple(PLACEHOLDERS))):
        given = own.get(group, {})
        if not isinstance(given, dict):
            return f".{group}: expected an object, got {given!r}"
        for name, text in given.items():
            if name not in known:
                return f".{group}.{name}: is not one of {', '.join(known)}"
            if not isinstance(text, str) or not text.strip():
                return f".{group}.{name}: expected a text, got {text!r}"
    for name, text in own.get("templates", {}).items():
        if (problem := _placeholder_problem(text, PLACEHOLDERS[name])) is not None:
            return f".templates.{name}: {problem}"
    return None


def _placeholder_problem(template: str, wanted: str) -> str | None:
    needed, found = wanted.replace("|", "").split(), _PLACEHOLDER.findall(template)
    if sorted(found) == sorted(needed):
        return None
    names = ", ".join(f"{{{name}}}" for name in needed)
    return f"must have {names}, each once, and no other placeholder; it has {found}"


def _version(name: str, words: Mapping[str, str], templates: Mapping[str, str]) -> str:
    content = json.dumps([words, templates], sort_keys=True).encode()
    return f"{name}+{hashlib.sha256(content).hexdigest()[:8]}"


def _packaged() -> Wording:
    text = resources.files(__package__).joinpath("wording.json").read_text(encoding="utf-8")
    return Wording("", {}, {}).replaced(json.loads(text), "wording.json")


PACKAGED = _packaged()
