"""The page of the fields of ``config.json``, made by calling the readers with altered files."""

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
# The smallest configurations of each method; two where the reader asks for different fields.
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
# Options with which a family reads further fields.
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
        "A field in a table means the same as in `transformers`, or the error names it. A field without effect may",
        "have any value: it does not change what `transformers` computes either.",
        "",
        "## Rotations",
        "",
        "`rope_parameters`, or `rope_scaling` in older files. `rope_theta` and `partial_rotary_factor` are used with",
        "every type. `mscale_all_dim` is used only with latent attention or YaRN.",
        "",
        "| `rope_type`, or `type` | fields that are used |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {_names(of)} |" for name, of in ROPE_TYPES.items()]
    without = sorted(ROPE_FIELDS - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    lines += [
        "",
        *_wrapped(f"Fields of other types have no effect: {_names(without)}."),
        "Any other field is refused, unless it is null, false or empty. Other types are refused too.",
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
        field = f"{QUANTIZATION}.{path}"
        reads = (partial(_read_with, method, told, path) for told in _QUANTISED[method])
        reasons = [_taken_by(read, field) for read in reads]
        if known := [each for each in reasons if "not known" not in each]:
            yield f"| `{path}` | {known[0]} |"
    yield from ("", *_wrapped(f"Without effect: {_names(sorted(without_effect))}."), "")


def _family(family: Family) -> Iterator[str]:
    yield f"### {', '.join(family.model_types)}"
    yield from ("", "| field | default | taken |", "|---|---|---|")
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
    # Some families' own default of the head's width cannot be rotated.
    if own.get("head_dim", 0) is None:
        own["head_dim"] = 128
    if "moe_k" in family.defaults:
        least.pop("num_experts_per_tok")
    # An end token that every vocabulary has, also the smallest one that is tried.
    return {**least, **own, "eos_token_id": 0, **changes}


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
    """Describe the values of a field by the reader's error for a value that no field takes."""
    if name in _ABOVE:
        return "see above"
    for meant, other in {"dtype": "torch_dtype", **family.spellings}.items():
        if name == other:
            return f"another name of `{meant}`"
    reasons = (_taken_by(partial(_read_changed, family, name, each), name) for each in _OPTIONS)
    return next((reason for reason in reasons if reason != "anything"), "anything")


def _taken_by(read: Callable[[Any], object], field: str) -> str:
    """Describe the values of a field by the reasons for which other values are refused."""
    taken = _reason_of(partial(read, "?"), field)
    refused = [_reason_of(partial(read, value), field) for value in (True, 1)]
    if taken == "true or false" and refused[0]:
        return f"false; {refused[0]}"
    if taken.startswith("an integer of at least 1") and refused[1]:
        return refused[1].removesuffix(", got 1").removeprefix("expected ")
    return taken or "anything"


def _reason_of(read: Callable[[], object], field: str) -> str:
    """Return the reason for which the value of a field is refused; empty if it is taken."""
    try:
        read()
    except CheckpointError as error:
        return _reason(error, field)
    return ""


def _reason(error: CheckpointError, field: str) -> str:
    """Keep the part of an error that describes the values of a field; empty if it is about another field."""
    named, _, reason = str(error).partition(": ")[2].partition(": ")
    if "both mean the same" in reason:
        return "another name of the same field"
    if named not in (field, field.rpartition(".")[0]):
        return ""
    reason = reason.replace("expected false: ", "").removeprefix("expected ")
    reason = re.sub(r"^'\?' is not supported; supported: ", "one of ", reason)
    return reason.removesuffix(", got '?'")


def _asked_of(method: str) -> set[str]:
    asked = set[str]().union(*(_read_format(method, told).asked for told in _QUANTISED[method]))
    names = {name.removeprefix(f"{QUANTIZATION}.") for name in asked - {QUANTIZATION}}
    return names - {"quant_method"}


def _read_with(method: str, example: Mapping[str, Any], path: str, value: Any) -> None:
    """Read an example of a method with one value replaced."""
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
