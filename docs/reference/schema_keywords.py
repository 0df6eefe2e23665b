"""The page of schema keywords and formats, made from the table that the grammars use."""

from moesaic.models.text.schemas.keywords import FORMATS, KEYWORDS, Keyword

_INTRODUCTION = """
This page is about the schemas in `response_format`, `structured_outputs.json`, `guided_json`, `json_schema`, and
`tools[].function.parameters`. The schema of a function binds calls with `strict: true`, or if `tool_choice` demands a
call.

- **enforced**: every answer fits the keyword.
- **ignored**: the keyword does not restrict values.
- **unenforced**: the keyword restricts values, but no grammar can enforce it. Without `strict` it is left out, and the
  header `x-moesaic-ignored` names it: `tools[0].function.parameters: not`. With `strict: true` the request is refused.

Any other name is ignored, and so is any keyword except `const` whose value is `null`. In forms with a tag for each
argument (`qwen3_coder`, `glm45`, `minimax_m2`), `pattern`, formats and lengths up to 2,000 are enforced for strings.
`minProperties` other than 1, and `maxProperties`, are unenforced at the root of a function.
""".strip()


def schema_keywords_page(made: str) -> str:
    """Write every keyword and every format with its effect; ``made`` is the second paragraph."""
    lines = ["# Keywords of JSON schemas", "", made, "", _INTRODUCTION, ""]
    lines += ["| keyword | effect | note |", "|---|---|---|", *_rows(KEYWORDS), ""]
    lines += ["## Formats", "", "Any other format is ignored.", ""]
    lines += ["| format | effect |", "|---|---|"]
    lines += [f"| `{name}` | {known.effect} |" for name, known in sorted(FORMATS.items())]
    return "\n".join(lines) + "\n"


def _rows(table: dict[str, Keyword]) -> list[str]:
    named = sorted(table.items(), key=lambda item: (item[1].effect, item[0].lstrip("$").lower()))
    return [f"| `{name}` | {known.effect} | {known.note} |" for name, known in named]
