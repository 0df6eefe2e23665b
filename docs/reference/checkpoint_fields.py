"""The page that lists what is taken of a ``config.json``, made by asking the readers themselves."""

import dataclasses
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from functools import partial
from typing import Any

from moesaic.errors import CheckpointError
from moesaic.models.configuration.config import read_config
from moesaic.models.configuration.families import FAMILIES
from moesaic.models.configuration.family import Family
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.quantization_fields import OF_SCHEME, OF_WEIGHTS, WITHOUT_EFFECT
from moesaic.models.configuration.rope_fields import ROPE_FIELDS, ROPE_TYPES
from moesaic.models.configuration.weight_format import read_weight_format

FILE = "config.json"
QUANTIZATION = "quantization_config"
_WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": 128}
# The least that each method asks for, and another way if it asks otherwise there.
_QUANTISED: Mapping[str, tuple[dict[str, Any], ...]] = {
    "fp8": ({}, {"weight_block_size": [128, 128]}),
    "mxfp4": ({},),
    "awq": ({"bits": 4, "group_size": 128},),
    "gptq": ({"bits": 4, "group_size": 128},),
    "compressed-tensors": (
        {"format": "pack-quantized", "config_groups": {"*": {"weights": _WEIGHTS}}},
        {
            "format": "float-quantized",
            "config_groups": {
                "*": {
                    "weights": {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": "block",
                        "block_structure": [128, 128],
                    }
                }
            },
        },
    ),
}
_ABOVE = {QUANTIZATION, "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"}
# With these, a family asks for fields that it does not need otherwise.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"use_sliding_window": True},
    {"topk_method": "group_limited_greedy", "n_group": 1, "topk_group": 1},
)


def fields_page() -> str:
    """List the fields of every family, of rotations and of every quantisation."""
    lines = [
        "# Fields of a checkpoint",
        "",
        "Made by `make reference` from the readers themselves; do not edit.",
        "",
        "A field in a table counts as in `transformers`, or it is refused by its name. A field without effect may say",
        "anything: it changes nothing of what `transformers` computes either.",
        "",
        "## Rotations",
        "",
        "`rope_parameters`, or `rope_scaling` of older files. `rope_theta` and `partial_rotary_factor` count with",
        "every type, `mscale_all_dim` with latent attention or YaRN alone.",
        "",
        "| `rope_type`, or `type` | fields that count |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {_names(of)} |" for name, of in ROPE_TYPES.items()]
    without = sorted(ROPE_FIELDS - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    lines += [
        "",
        *_wrapped(f"Fields of other types have no effect: {_names(without)}."),
        "Any other field is refused, unless it is null, false or empty. So are other types.",
        "",
        "## Quantised weights",
        "",
        f"`{QUANTIZATION}`. Any other field is refused, unless it is null, false or empty.",
        "",
    ]
    for method, without_effect in sorted(WITHOUT_EFFECT.items()):
        lines += _method(method, without_effect)
    lines += [
        f"Without effect in one of the `config_groups`: {_names(sorted(OF_SCHEME))};",
        f"in its `weights`: {_names(sorted(OF_WEIGHTS))}.",
        "",
        "## Families",
        "",
        "Fields that a family's class does not know have no effect, as in `transformers`.",
        "",
    ]
    for family in {id(each): each for each in FAMILIES.values()}.values():
        lines += _family(family)
    return "\n".join(lines).rstrip() + "\n"


def _method(method: str, without_effect: Set[str]) -> Iterator[str]:
    yield f"### `quant_method`: `{method}`"
    yield from ("", "| field | taken |", "|---|---|")
    for path in sorted(_asked_of(method) - without_effect):
        said = [_taken_by(partial(_read_with, method, told, path)) for told in _QUANTISED[method]]
        if known := [each for each in said if "not known" not in each]:
            yield f"| `{path}` | {known[0]} |"
    yield from ("", *_wrapped(f"Without effect: {_names(sorted(without_effect))}."), "")


def _family(family: Family) -> Iterator[str]:
    yield f"### {', '.join(family.model_types)}"
    yield from ("", "| field | left out, it is | taken |", "|---|---|---|")
    asked = {name for name in _asked(family) if "." not in name} - {"model_type"}
    for name in sorted(asked):
        default = f"`{family.defaults[name]!r}`" if name in family.defaults else ""
        default = default.replace("True", "true").replace("False", "false").replace("None", "null")
        yield f"| `{name}` | {default} | {_taken(family, name)} |"
    unread = sorted(_known_to_transformers(family.model_types[0]) - asked)
    yield from ("", *_wrapped(f"Without effect: {_names(unread)}."), "")


def _whole(family: Family, changes: Mapping[str, Any]) -> dict[str, Any]:
    least = {
        "num_experts_per_tok": 1,
        "num_attention_heads": 32,
        "model_type": family.model_types[0],
    }
    own = {name: value for name, value in family.defaults.items() if name != "moe_k"}
    if "moe_k" in family.defaults:
        least.pop("num_experts_per_tok")
    return {**least, **own, **changes}


def _read_changed(family: Family, name: str, options: Mapping[str, Any], value: Any) -> None:
    read_config(Fields(FILE, _whole(family, {**options, name: value})), Fields(FILE, {}))


def _asked(family: Family) -> set[str]:
    asked = set[str]()
    for options in _OPTIONS:
        fields = Fields(FILE, _whole(family, options))
        with suppress(CheckpointError):  # an option of other families
            read_config(fields, Fields(FILE, {}))
        asked |= fields.asked
    return asked


def _taken(family: Family, name: str) -> str:
    """Tell what a field takes, by what the reader says of a value that no field takes."""
    if name in _ABOVE:
        return "see above"
    for meant, other in {"dtype": "torch_dtype", **family.spellings}.items():
        if name == other:
            return f"another name of `{meant}`"
    said = (_taken_by(partial(_read_changed, family, name, options)) for options in _OPTIONS)
    return next((each for each in said if each != "anything"), "anything")


def _taken_by(read: Callable[[Any], object]) -> str:
    """Tell what is taken, by why other values are refused."""
    said = _reason_of(partial(read, "?"))
    refused = [_reason_of(partial(read, value)) for value in (True, 1)]
    if said == "true or false" and refused[0]:
        return f"false; {refused[0]}"
    if said.startswith("an integer of at least 1") and refused[1]:
        return refused[1].removesuffix(", got 1").removeprefix("expected ")
    return said or "anything"


def _reason_of(read: Callable[[], object]) -> str:
    """Tell why something is refused; empty: it is not."""
    try:
        read()
    except CheckpointError as error:
        return _reason(error)
    return ""


def _reason(error: CheckpointError) -> str:
    """Keep of an error what it says of values that are taken."""
    said = str(error).partition(": ")[2].partition(": ")[2]
    if "both mean the same" in said:
        return "another name: what that says"
    said = said.replace("expected false: ", "")
    said = re.sub(r"^'\?' is not supported; supported: ", "one of ", said)
    return re.sub(r"(expected )?(.*), got '\?'$", r"\2", said)


def _asked_of(method: str) -> set[str]:
    asked = set[str]().union(*(_read_format(method, told).asked for told in _QUANTISED[method]))
    names = {name.removeprefix(f"{QUANTIZATION}.") for name in asked - {QUANTIZATION}}
    return names - {"quant_method"}


def _read_with(method: str, example: Mapping[str, Any], path: str, value: Any) -> None:
    """Read an example of a method with another value."""
    told = json.loads(json.dumps(example))
    place, *others = told, *path.split(".")
    for name in others[:-1]:
        place = place.setdefault(name, {})
    place[others[-1]] = value
    _read_format(method, told)


def _read_format(method: str, told: Mapping[str, Any]) -> Fields:
    fields = Fields(FILE, {QUANTIZATION: {"quant_method": method, **told}})
    read_weight_format(fields)
    return fields


def _known_to_transformers(model_type: str) -> set[str]:
    from transformers import CONFIG_MAPPING

    return {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 118, break_on_hyphens=False)
