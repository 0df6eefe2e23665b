"""The page that says what each keyword of a JSON schema does, made from the table that grammars are made by."""

from moesaic.models.text.schemas.keywords import FORMATS, KEYWORDS, Keyword

_INTRODUCTION = """
Schemas come with functions (`tools[].function.parameters`, where a call is bound: `strict: true`, or a `tool_choice`
that must call), and with `response_format`, `structured_outputs.json`, `guided_json` and `json_schema`.

- **enforced**: what is written fits it.
- **ignored**: it says nothing about a value.
- **unenforced**: it says something that no grammar can hold. Without `strict` it is left out, and the header
  `x-moesaic-ignored` names it: `tools[0].function.parameters: not`. With `strict: true` the request is refused.

Any other name is ignored, and so is any keyword whose value is `null`, but `const`. In forms with a tag for each
argument (`qwen3_coder`, `glm45`, `minimax_m2`) texts are held to `pattern`, to lengths up to 2,000, and to formats;
`minProperties` other than 1, and `maxProperties`, are unenforced at the root of a function.
""".strip()


def schema_keywords_page(made: str) -> str:
    """Every keyword and every format, with its effect."""
    lines = ["# Keywords of JSON schemas", "", made, "", _INTRODUCTION, ""]
    lines += ["| keyword | effect | note |", "|---|---|---|", *_rows(KEYWORDS), ""]
    lines += ["## Formats", "", "Any other format is ignored.", ""]
    lines += ["| format | effect |", "|---|---|"]
    lines += [f"| `{name}` | {known.effect} |" for name, known in sorted(FORMATS.items())]
    return "\n".join(lines) + "\n"


def _rows(table: dict[str, Keyword]) -> list[str]:
    named = sorted(table.items(), key=lambda item: (item[1].effect, item[0].lstrip("$").lower()))
    return [f"| `{name}` | {known.effect} | {known.note} |" for name, known in named]
