"""One conversation from its checked body to its growing answers, whichever API it came by."""

from dataclasses import dataclass
from typing import NamedTuple

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.bodies import with_template
from moesaic.services.gateway.fields.generating import ChatWire
from moesaic.services.gateway.fields.messages import turns_of
from moesaic.services.gateway.gateway import Admitted, Gateway
from moesaic.services.gateway.generate.answers import Answers, begin
from moesaic.services.gateway.generate.runs import LogprobCounts, kept_of
from moesaic.services.gateway.generate.shapes import ChatShape
from moesaic.services.gateway.generate.speech import (
    Speech,
    template_kwargs_of,
    tools_for_template,
    wanted_of,
)
from moesaic.services.gateway.http.request_record import RequestRecord


class EncodedChat(NamedTuple):
    """A conversation as tokens, and what its answers may be made of."""

    prompt: list[int]
    speech: Speech


@dataclass(frozen=True)
class Conversation:
    """A conversation that workers are about to answer.

    Attributes:
        prompt: token ids.
        answers: the answers, growing.
        shape: how chats tell them.
    """

    prompt: list[int]
    answers: Answers
    shape: ChatShape


async def begin_chat(
    admitted: Admitted[ChatWire], encoded: EncodedChat | None = None
) -> Conversation:
    """Make the runs of a conversation, which is encoded before if it is not yet.

    Raises:
        InvalidInput: a field cannot be honoured.
        TenantLimited: the tenant may not have so many tokens now.
    """
    body, language = admitted.body, admitted.gateway.language
    kept = kept_of(admitted)
    if encoded is None:
        most = None if kept is None else language.max_listed
        encoded = await encode_chat(admitted.gateway, admitted.record, body, most)
    prompt, speech = encoded.prompt[-(kept or 0) :], encoded.speech
    logprobs = LogprobCounts(_top_logprobs(body), body.prompt_logprobs)
    answers = await begin(admitted, [prompt], "messages", logprobs, speech=speech)
    return Conversation(prompt, answers, ChatShape(body, language, speech))


async def encode_chat(
    gateway: Gateway, record: RequestRecord, body: ChatWire, most: int | None = None
) -> EncodedChat:
    """Encode a conversation; fields that change nothing are noted in its record.

    Args:
        gateway, record: that serve the request.
        body: the conversation.
        most: bound of the tokens, if not the model's context.

    Raises:
        InvalidInput: a field cannot be honoured, or the conversation is too long.
    """
    language = gateway.language
    size = record.num_bytes
    wanted = await language.work(size, wanted_of, body, language)
    words = language.template_words
    template_kwargs, unplaced = template_kwargs_of(body, language)
    prompt, opened, unknown = await language.encode_chat(
        await language.work(size, turns_of, body.messages, words),
        add_generation_prompt=body.add_generation_prompt,
        template_kwargs=template_kwargs,
        control_tokens=gateway.settings.control_tokens_in_content,
        tools=await language.work(size, tools_for_template, body, wanted),
        most=most,
        size=size,
        continues=body.continue_final_message is True,
    )
    record.ignored = with_template(record.ignored, [*unknown, *unplaced], words)
    return EncodedChat(prompt, Speech(language.dialect, wanted, opened))


def _top_logprobs(body: ChatWire) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs", "needs logprobs to be true")
    return (body.top_logprobs or 0) if body.logprobs else None
