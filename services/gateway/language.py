"""The model's tokenizer and chat template.

Long texts go to a few threads. Short ones are processed at once, because a switch to a thread and back takes as long
as a few hundred tokens. Rendering the chat template waits for a helper process, so it always goes to a thread. Short
texts have separate threads for that, and never wait for long texts.
"""

import asyncio
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from moesaic.classification.dialogue import Dialogue
from moesaic.classification.forms import CHEAPEST_FIRST
from moesaic.classification.prompts import Method
from moesaic.classification.wording import PACKAGED, Wording
from moesaic.errors import InvalidInput
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.configuration.context import with_context
from moesaic.models.configuration.fields import Fields, read_json
from moesaic.models.configuration.strict_json import shown
from moesaic.models.configuration.tokenizer_files import read_special_tokens
from moesaic.models.text.chat import ChatTemplate, last_text, with_texts
from moesaic.models.text.dialects.detection import ReasoningParser, ToolCallParser, dialect_of
from moesaic.models.text.dialects.dialect import Dialect
from moesaic.models.text.dialects.thinking import SWITCHES, Opened
from moesaic.models.text.spelling import SpelledPrompt, Spelling
from moesaic.models.text.template_files import template_info
from moesaic.models.text.tokenizer import StreamDecoder, TextTooLong, Tokenizer

T = TypeVar("T")

NUM_THREADS = 2
SHORT_CHARS = 2000  # about 0.3 ms
HUGE_CHARS = 1 << 18  # from here on a text takes so long that it has to wait for others of its kind
MAX_LISTED = 1 << 19  # tokens that ``/tokenize`` lists, if the context is shorter
PER_MESSAGE_CHARS = 50  # what rendering a message costs, as text
SERVING_FILE = "moesaic.json"  # what a checkpoint's maker says about serving it; optional
_OWN_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "messages",
)  # fields of a request, also if a template reads them


class ChatPrompt(NamedTuple):
    """A conversation as tokens.

    Attributes:
        token_ids: its tokens.
        opened: how its end leaves the reasoning.
        ignored: names of keywords that the chat template does not read.
    """

    token_ids: list[int]
    opened: Opened
    ignored: list[str]


class Language:
    """Texts as tokens and back, for the served model."""

    def __init__(
        self,
        directory: Path,
        tool_call_parser: ToolCallParser = "auto",
        reasoning_parser: ReasoningParser = "auto",
        *,
        max_model_len: int = 0,
    ) -> None:
        """Read a model directory.

        Args:
            directory: in Hugging Face format.
            tool_call_parser: how the model writes tool calls.
            reasoning_parser: how it sets reasoning apart.
            max_model_len: shortens contexts; 0 does not.

        Raises:
            CheckpointError: a file is missing or not valid.
        """
        self.directory = directory
        self.config: ModelConfig = with_context(load_config(directory), max_model_len)
        self.tokenizer = Tokenizer.load(directory)
        self.spelling = Spelling(self.tokenizer)
        self._no_template = "this model has no chat template"
        self._template: ChatTemplate | None = None
        try:
            self._template = ChatTemplate.load(directory)
        except InvalidInput as error:
            self._no_template = error.fix
        source = self._template.source if self._template is not None else None
        self.dialect: Dialect = dialect_of(source, tool_call_parser, reasoning_parser)
        # The template decides this, also if other parsers are set.
        self._closing = dialect_of(source).closing
        serving = _serving(directory)
        self.wording = _wording(serving)
        self.classify_methods = _classify_methods(serving)
        self.tokenizer_info = _tokenizer_info(directory)
        # Sizes that vectors of hidden states may be cut to.
        self.dimensions = _dimensions(directory, self.config.hidden_size)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="language")
        self._thread_of_huge = ThreadPoolExecutor(1, thread_name_prefix="language-huge")
        self._threads_of_short = ThreadPoolExecutor(
            NUM_THREADS, thread_name_prefix="language-short"
        )

    @functools.cached_property
    def dialogue(self) -> Dialogue:
        """The dialogue of the model; learning it renders the chat template.

        Raises:
            InvalidInput: the template refuses a plain question.
        """
        return self._dialogue({})

    def dialogue_with(self, kwargs: Mapping[str, Any]) -> tuple[Dialogue, list[str]]:
        """Learn the dialogue of the model with some keywords for the chat template.

        Returns:
            The dialogue, and the keywords that the template does not read, as names of fields.

        Raises:
            InvalidInput: the template refuses a plain question.
        """
        ignored = self._ignored(kwargs, tools=kwargs.get("tools") is not None)
        kwargs = _without(kwargs, ignored)
        told = (
            self._dialogue(with_texts(kwargs, self.tokenizer.parted)) if kwargs else self.dialogue
        )
        return told, _fields(ignored)

    def _dialogue(self, kwargs: Mapping[str, Any]) -> Dialogue:
        encoder = _InContext(self.tokenizer, self.max_tokens)
        if self._template is None:
            return Dialogue.of(encoder, None, self.config.eos_token_ids, self.wording)
        off = {name: False for name in SWITCHES if name in self._template.variables}
        template = _With(self._template, {**off, **kwargs})
        ends, wording = self.config.eos_token_ids, self.wording
        return Dialogue.of(encoder, template, ends, wording, self._closing)

    def _ignored(self, kwargs: Mapping[str, Any], *, tools: bool) -> list[str]:
        """List the keywords that the chat template does not read.

        Raises:
            InvalidInput: one has the name of a field of the request.
        """
        for name in kwargs.keys() & set(_OWN_FIELDS):
            fix = f"send {name} as a field of the request, not here"
            raise InvalidInput(f"chat_template_kwargs.{name}", fix)
        return [*kwargs] if self._template is None else self._template.ignored(kwargs, tools=tools)

    @property
    def max_tokens(self) -> int:
        """Tokens of prompt and answer together."""
        return self.config.max_positions

    async def work(self, num_chars: int, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Do some work on texts of so many characters: on a thread if it takes long, one at a time if seconds."""
        if num_chars <= SHORT_CHARS:
            return work(*args, **kwargs)
        return await self.work_waiting(num_chars, work, *args, **kwargs)

    async def work_waiting(
        self, num_chars: int, work: Callable[..., T], *args: Any, **kwargs: Any
    ) -> T:
        """Do some work that renders the chat template: always on a thread, as it waits for another process."""
        call = functools.partial(work, *args, **kwargs)
        threads = self._threads_of_short
        if num_chars > SHORT_CHARS:
            threads = self._threads if num_chars < HUGE_CHARS else self._thread_of_huge
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    @contextmanager
    def naming(self, field: str, beside: str = "") -> Iterator[None]:
        """Turn a text that is too long into an error of its ``field``, and of the fields ``beside`` it."""
        try:
            yield
        except TextTooLong as error:
            fix = (
                f"this model's maximum context length is {self.max_tokens} tokens; the text"
                f"{f' made of it and {beside}' if beside else ''} has {error.size}, "
                f"and {error.most} tokens are the most"
            )
            raise InvalidInput(field, fix, code=error.code) from None

    @property
    def max_listed(self) -> int:
        """Tokens of a text that need not fit the model's context."""
        return max(self.max_tokens, MAX_LISTED)

    def encode_prompt(
        self, text: str, field: str, *, add_special_tokens: bool, most: int | None = None
    ) -> list[int]:
        """Encode a text of at most ``most`` tokens; None: those of the context. Control tokens in it are taken as such.

        Raises:
            InvalidInput: it does not fit, naming ``field``.
        """
        with self.naming(field):
            return self.tokenizer.encode(text, add_special_tokens, most or self.max_tokens)

    def checked(self, token_ids: list[int], field: str) -> list[int]:
        """Give token ids back that all are in the vocabulary.

        Raises:
            InvalidInput: one is not, naming ``field``.
        """
        size = self.config.vocab_size
        if not all(0 <= token_id < size for token_id in token_ids):
            raise InvalidInput(field, f"token ids must be in 0..{size - 1}")
        return token_ids

    async def list_tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text that need not fit the model's context.

        Raises:
            InvalidInput: the text is longer than ``MAX_LISTED`` tokens and the context.
        """
        encode, most = self.tokenizer.encode, self.max_listed
        with self.naming("prompt"):
            return await self.work(len(text), encode, text, add_special_tokens, most)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_kwargs: dict[str, Any],
        control_tokens: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        most: int | None = None,
        size: int = HUGE_CHARS,
        continues: bool = False,
    ) -> ChatPrompt:
        """Encode a conversation.

        Args:
            messages, add_generation_prompt, template_kwargs, tools: for the template.
            control_tokens: true: control tokens in messages are encoded as such; false: as plain text.
            most: bound of the tokens, if not the model's context.
            size: bytes of all this as JSON.
            continues: end with the last message's text, so that the model continues it.

        Raises:
            InvalidInput: there is no chat template, it refuses these messages, or they are too long.
        """
        if self._template is None:
            # A new one each time: an error keeps hold of all the places that it was raised at.
            raise InvalidInput("messages", self._no_template)
        if continues and add_generation_prompt:
            fix = "needs add_generation_prompt to be false, since no new message begins"
            raise InvalidInput("continue_final_message", fix)
        template = self._template
        tools = tools or template_kwargs.get("tools")
        ignored = self._ignored(template_kwargs, tools=tools is not None)
        kwargs = _without(template_kwargs, ignored)
        kwargs |= {} if tools is None else {"tools": tools}
        change = str if control_tokens else self.tokenizer.parted

        def render() -> str:
            return template.write(
                messages, add_generation_prompt, kwargs, change, continues=continues
            )

        def opened_by(text: str) -> Opened:
            if continues:
                return self.dialect.left_within(last_text(messages))
            return self.dialect.left_by(text)

        def encode(text: str) -> ChatPrompt:
            encode = self.tokenizer.encode if control_tokens else self.tokenizer.encode_parted
            with self.naming("messages"):
                token_ids = encode(text, False, most or self.max_tokens)
            return ChatPrompt(token_ids, opened_by(text), _fields(ignored))

        text = await self.work_waiting(size, render)
        return await self.work(len(text), encode, text)

    def takes(self, variable: str) -> bool:
        """True if the chat template asks for a variable, such as ``tools``."""
        return self._template is not None and variable in self._template.variables

    @property
    def template_words(self) -> frozenset[str]:
        """Fields and strings that the chat template names, such as fields of messages."""
        return frozenset() if self._template is None else self._template.words

    def decoder(self, *, skip_special_tokens: bool, kept: Collection[str] = ()) -> StreamDecoder:
        """Make a decoder for one answer, which keeps the special tokens with some texts."""
        return StreamDecoder(self.tokenizer, skip_special_tokens, kept)

    def spelled_prompt(
        self, token_ids: Sequence[int], text: str | None = None, *, framed: bool = False
    ) -> SpelledPrompt:
        """Begin to spell the tokens of a prompt; without ``text``, that of the decoded tokens."""
        if text is None:
            text = self.tokenizer.decode_long(token_ids, skip_special_tokens=False)
        return SpelledPrompt(self.spelling, token_ids, text, framed=framed)

    def marker_id(self, text: str) -> int | None:
        """Look up the added token that a text is by itself."""
        return self.tokenizer.added_ids.get(text)

    def close(self) -> None:
        """Let the threads go."""
        for threads in (self._threads, self._thread_of_huge, self._threads_of_short):
            threads.shutdown(wait=False, cancel_futures=True)


class _InContext:
    """The tokenizer for prompts, which must fit the model's context."""

    def __init__(self, tokenizer: Tokenizer, most: int) -> None:
        self.parted = tokenizer.parted
        self._tokenizer, self._most = tokenizer, most

    def encode_parted(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text.

        Raises:
            TextTooLong: its tokens do not fit.
        """
        return self._tokenizer.encode_parted(text, add_special_tokens, self._most)


class _With:
    """A chat template with some keywords set."""

    def __init__(self, template: ChatTemplate, kwargs: Mapping[str, Any]) -> None:
        self._template, self._kwargs = template, kwargs

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Write a conversation as text."""
        return self._template.write(messages, add_generation_prompt, self._kwargs)


def _without(kwargs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    left_out = set(names)
    return {name: value for name, value in kwargs.items() if name not in left_out}


def _fields(keywords: Sequence[str]) -> list[str]:
    return [f"chat_template_kwargs.{name}" for name in keywords]


def _tokenizer_info(directory: Path) -> dict[str, Any]:
    """Read ``tokenizer_config.json`` as clients expect it: special tokens as texts, the chat template inside."""
    path = directory / "tokenizer_config.json"
    info: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    info |= dict.fromkeys(("bos_token", "eos_token", "pad_token"))
    info |= {
        name: value
        for name, value in (read_json(path) if path.is_file() else {}).items()
        if not name.endswith("_token")
    }
    return info | template_info(directory) | read_special_tokens(directory, of_class=False)


def _dimensions(directory: Path, hidden_size: int) -> Collection[int]:
    """Read to which sizes a model's vectors may be cut; it was trained for these."""
    config = read_json(directory / "config.json")
    if sizes := config.get("matryoshka_dimensions"):
        return {*sizes, hidden_size}
    return range(1, hidden_size + 1) if config.get("is_matryoshka") else (hidden_size,)


def _serving(directory: Path) -> dict[str, Any]:
    path = directory / SERVING_FILE
    return read_json(path) if path.exists() else {}


def _wording(serving: dict[str, Any]) -> Wording:
    """Read the words of questions to the model: its own where it has some.

    Raises:
        CheckpointError: its own are not valid.
    """
    own = serving.get("wording")
    return PACKAGED if own is None else PACKAGED.replaced(own, SERVING_FILE)


def _classify_methods(values: dict[str, Any]) -> tuple[Method, ...]:
    """Read the order in which ``auto`` tries the methods of classification.

    Raises:
        CheckpointError: it names no method.
    """
    named = values.get("classify_methods", list(CHEAPEST_FIRST))
    known = isinstance(named, list) and all(method in CHEAPEST_FIRST for method in named)
    if not named or not known:
        allowed = ", ".join(CHEAPEST_FIRST)
        raise Fields(SERVING_FILE, values).error(
            "classify_methods", f"expected a list of {allowed}, got {shown(named)}"
        )
    return tuple(method for method in named if method in CHEAPEST_FIRST)
