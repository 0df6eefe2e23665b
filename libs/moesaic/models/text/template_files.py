"""The files in which a model publishes its chat templates, by the rules of ``transformers``."""

from pathlib import Path
from typing import Any

from moesaic.errors import CheckpointError
from moesaic.models.configuration.fields import read_json, read_text
from moesaic.models.configuration.tokenizer_files import CONFIG

TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
PROCESSOR_FILE = "chat_template.json"  # older files of models that also take images
DEFAULT, TOOL_USE = "default", "tool_use"


def read_templates(directory: Path) -> dict[str, tuple[str, str]]:
    """Read the chat templates of a model directory.

    Templates in files of their own come before those in ``tokenizer_config.json``.

    Returns:
        The file and the text of each template, by name; a single one is the default.

    Raises:
        CheckpointError: a file is invalid.
    """
    files = {DEFAULT: directory / TEMPLATE_FILE}
    files |= {path.stem: path for path in sorted((directory / MORE_TEMPLATES).glob("*.jinja"))}
    own = {name: (path.name, read_text(path)) for name, path in files.items() if path.is_file()}
    return own or _in_json(directory / CONFIG) or _in_json(directory / PROCESSOR_FILE)


def template_info(directory: Path) -> dict[str, Any]:
    """Describe the templates, wherever they are, as ``tokenizer_config.json`` has them."""
    found = {name: source for name, (_, source) in read_templates(directory).items()}
    if not found:
        return {}
    if found.keys() == {DEFAULT}:
        return {"chat_template": found[DEFAULT]}
    return {"chat_template": [{"name": name, "template": source} for name, source in found.items()]}


def _in_json(path: Path) -> dict[str, tuple[str, str]]:
    template = read_json(path).get("chat_template") if path.is_file() else None
    if template is None:
        return {}
    named = template if isinstance(template, dict) else {DEFAULT: template}
    if isinstance(template, list):
        entries = (entry for entry in template if isinstance(entry, dict))
        named = {
            entry["name"]: entry.get("template")
            for entry in entries
            if isinstance(entry.get("name"), str)
        }
    for name, source in named.items():
        if not isinstance(source, str):
            place = "" if source is template else f" {name!r}"
            fix = f"chat_template{place}: expected text, got {type(source).__name__}"
            raise CheckpointError(path.name, fix)
    return {name: (path.name, source) for name, source in named.items()}
