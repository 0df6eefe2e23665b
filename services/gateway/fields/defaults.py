"""Defaults of a model's own: ``generation_config.json`` says how tokens are picked where a request does not."""

from pathlib import Path

from pydantic import ValidationError

from moesaic.errors import CheckpointError
from moesaic.models.configuration.fields import read_json
from moesaic.services.gateway.fields.generating import SamplingWire

FILE = "generation_config.json"
FIELDS = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty")),
    "max_new_tokens": "max_tokens",
}
"""Fields of the file that are taken, as vLLM takes them, with their names in a body where these differ."""

NO_DEFAULTS = SamplingWire.model_validate({})


def read_defaults(directory: Path) -> SamplingWire:
    """Read the fields that a model's maker sets, in the bounds that requests have.

    Raises:
        CheckpointError: one is not valid.
    """
    path = directory / FILE
    found = read_json(path) if path.is_file() else {}
    names = {field or name: name for name, field in FIELDS.items() if found.get(name) is not None}
    try:
        return SamplingWire.model_validate({field: found[name] for field, name in names.items()})
    except ValidationError as error:
        [first, *_] = error.errors()
        name = names[str(first["loc"][0])]
        said = first["msg"][:1].lower() + first["msg"][1:]
        fix = "mend it, or have the file passed over with --generation-config none"
        raise CheckpointError(FILE, f"{name}: {said}, got {found[name]!r}: {fix}") from None
