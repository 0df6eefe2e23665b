"""``/v1/chat/completions``."""

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from moesaic.errors import InvalidInput
from services.gateway.bad_words import bad_words_of
from services.gateway.choices import Piece
from services.gateway.deliver import Choices, Delivery, answer_id, ids_if, token_texts
from services.gateway.fields import ChatWire
from services.gateway.gateway import exchange_of, gateway_of, terms_of
from services.gateway.generation import Answers, Limits, runs_of
from services.gateway.logprobs import chat_logprobs, prompt_logprobs
from services.gateway.openapi import INFERENCE, answers
from services.gateway.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    Delta,
    PromptLogprobs,
)

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    responses=answers(ChatCompletion, stream=ChatCompletionChunk, errors=INFERENCE),
)
async def create_chat_completion(body: ChatWire, request: Request) -> Response:
    """Answer a conversation."""
    gateway, exchange = gateway_of(request), exchange_of(request)
    gateway.check(exchange, body)
    gateway.admit(exchange)
    deadline = gateway.deadline(request, body)
    prompt = await gateway.language.encode_chat(
        [message.for_template(f"messages[{i}]") for i, message in enumerate(body.messages)],
        add_generation_prompt=body.add_generation_prompt,
        template_kwargs=body.chat_template_kwargs or {},
        control_tokens=gateway.settings.control_tokens_in_content,
    )
    limits = Limits(gateway.max_tokens, body.answer_tokens, None, body.answer_tokens_field)
    wanted = _top_logprobs(body), body.prompt_logprobs
    terms = terms_of(body, exchange.tenant)
    bad_words = await bad_words_of(gateway.language, body.bad_words)
    runs = runs_of(body, [prompt], limits, "messages", *wanted, terms, bad_words)
    growing = Answers(gateway, exchange, body, runs)
    exchange.take_tokens(limits.bound * len(runs))
    shape = _ChatShape(body, token_texts(gateway, body))

    def of_prompt() -> PromptLogprobs:
        num_top = body.prompt_logprobs or 0
        return prompt_logprobs(prompt, runs[0].prompt_logprobs, shape.text_of, num_top)

    delivery = Delivery(
        gateway,
        body,
        growing,
        shape,
        answer_id("chatcmpl"),
        deadline,
        prompt_token_ids=prompt if body.return_token_ids else None,
        prompt_logprobs=of_prompt if body.prompt_logprobs is not None else None,
    )
    return await delivery.respond(request)


def _top_logprobs(body: ChatWire) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs", "needs logprobs to be true")
    return (body.top_logprobs or 0) if body.logprobs else None


@dataclass(frozen=True)
class _ChatShape:
    body: ChatWire
    text_of: Callable[[int], str]
    whole_type = ChatCompletion
    chunk_type = ChatCompletionChunk

    def opening(self) -> Choices:
        """Each choice begins with its role."""
        delta = Delta(role="assistant", content="")
        return [ChatChunkChoice(index=i, delta=delta) for i in range(self.body.n)]

    def chunks(self, piece: Piece) -> Choices:
        """Text first, the finish reason with an empty delta."""
        chunks: Choices = []
        if piece.text or (piece.token_ids and (self.body.logprobs or self.body.return_token_ids)):
            chunks.append(
                ChatChunkChoice(
                    index=piece.index,
                    delta=Delta(content=piece.text),
                    logprobs=self._logprobs(piece),
                    token_ids=ids_if(self.body.return_token_ids, piece.token_ids),
                )
            )
        if piece.finish_reason:
            chunks.append(
                ChatChunkChoice(
                    index=piece.index,
                    delta=Delta(),
                    finish_reason=piece.finish_reason,
                    stop_reason=piece.stop_reason,
                )
            )
        return chunks

    def whole(self, piece: Piece) -> ChatChoice:
        """The assistant's turn."""
        return ChatChoice(
            index=piece.index,
            message=ChatMessage(piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=ids_if(self.body.return_token_ids, piece.token_ids),
        )

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(piece.token_ids, piece.logprobs, self.text_of)
