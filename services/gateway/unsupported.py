"""Known fields that cannot be honoured yet, and the values of them that change nothing."""

from typing import Any

import structlog

from moesaic.errors import InvalidInput
from services.gateway.fields import Wire

log = structlog.get_logger()

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (),  # n
    "chat_template": (),
    "continue_final_message": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "logprob_token_ids": ([],),
    "max_tokens_per_doc": (),
    "max_tokens_per_query": (),
    "modalities": (["text"],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_activation": (True,),
    "use_beam_search": (False,),
}


def check_extras(body: Wire) -> None:
    """Refuse what cannot be honoured; note what is unknown.

    Raises:
        InvalidInput: with code ``unsupported_parameter`` and the field's name.
    """
    extras = body.model_extra or {}
    for name, value in extras.items():
        values = (getattr(body, "n", 1),) if name == "best_of" else _NEUTRAL.get(name)
        if values is not None and value is not None and value not in values:
            neutral = " or ".join(map(repr, values))
            fix = f"is not supported yet; leave it out{f' or send {neutral}' if neutral else ''}"
            raise InvalidInput(name, fix, code="unsupported_parameter")
    if unknown := sorted(name[:60] for name in extras if name not in _NEUTRAL)[:20]:
        log.debug("request.fields_ignored", fields=unknown)
