"""One conversation from its checked body to its growing answers, whichever API it came by."""

from dataclasses import dataclass

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.bodies import with_template
from moesaic.services.gateway.fields.generating import ChatWire
from moesaic.services.gateway.fields.messages import turns_of
from moesaic.services.gateway.gateway import Admitted
from moesaic.services.gateway.generate.answers import Answers, begin
from moesaic.services.gateway.generate.runs import LogprobCounts
from moesaic.services.gateway.generate.shapes import ChatShape
from moesaic.services.gateway.generate.speech import (
    Speech,
    template_kwargs_of,
    tools_for_template,
    wanted_of,
)


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


async def begin_chat(admitted: Admitted[ChatWire]) -> Conversation:
    """Encode a conversation and make its runs; fields that change nothing are noted in its record.

    Raises:
        InvalidInput: a field cannot be honoured.
        TenantLimited: the tenant may not have so many tokens now.
    """
    gateway, body, record = admitted.gateway, admitted.body, admitted.record
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
        size=size,
        continues=body.continue_final_message is True,
    )
    record.ignored = with_template(record.ignored, [*unknown, *unplaced], words)
    logprobs = LogprobCounts(_top_logprobs(body), body.prompt_logprobs)
    speech = Speech(language.dialect, wanted, opened)
    answers = await begin(admitted, [prompt], "messages", logprobs, speech=speech)
    return Conversation(prompt, answers, ChatShape(body, language, speech))


def _top_logprobs(body: ChatWire) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs", "needs logprobs to be true")
    return (body.top_logprobs or 0) if body.logprobs else None
