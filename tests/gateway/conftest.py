"""A gateway on a real port, before attention workers that are real gRPC servers with scripted answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tokenizers
import uvloop
from structlog.testing import capture_logs
from tokenizers import decoders, models, pre_tokenizers, trainers

from moesaic.cluster.rpc.channels import SERVER_OPTIONS
from moesaic.messages.registry import WorkerRecord
from moesaic.services.gateway.app import make_app
from moesaic.services.gateway.gateway import Gateway
from moesaic.services.gateway.language import Language
from moesaic.services.gateway.main import carry_out_batches, http_server
from moesaic.services.gateway.settings import GatewaySettings
from moesaic.services.gateway.workers import routing
from moesaic.v1 import attention_pb2 as pb
from moesaic.v1 import attention_pb2_grpc
from tests.waiting import HANG_S, until

MAX_POSITIONS = 256
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": MAX_POSITIONS,
    "torch_dtype": "float32",
}
WORDS = ["yes no travel music hello world this is a story about a house " * 20]


def build_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    tokenizer = build_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    config = {**CONFIG, "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": end}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE})
    )
    return directory


@pytest.fixture(scope="session")
def language(model_directory: Path) -> Language:
    return Language(model_directory)


Emit = Callable[..., None]
Script = Callable[[pb.Submit, Emit], Awaitable[None]]


class ScriptedAttention(attention_pb2_grpc.AttentionServiceServicer):
    """Answers each Submit as its script says; ``emit(tokens=..., finished=..., ...)`` sends an event."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.submits: list[pb.Submit] = []
        self.cancels: asyncio.Queue[pb.Cancel] = asyncio.Queue()
        self.profile = pb.EngineProfile()
        self.blocks: list[bytes] = []  # what a snapshot says
        self.num_watches = 0
        self.streams: set[asyncio.Queue[pb.ExecuteResponse]] = set()
        self.address = ""
        self.server: grpc.aio.Server | None = None

    async def Execute(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        events: asyncio.Queue[pb.ExecuteResponse] = asyncio.Queue()
        self.streams.add(events)
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read(request_iterator, events, group))
            try:
                while True:
                    yield await events.get()
            finally:
                reader.cancel()
                self.streams.discard(events)

    def tell_blocks(self, sequence: int, stored: list[bytes], evicted: list[bytes]) -> None:
        """Say on all streams that the cache has changed."""
        change = pb.BlockChanges(
            sequence=sequence, stored=b"".join(stored), evicted=b"".join(evicted)
        )
        for events in self.streams:
            events.put_nowait(pb.ExecuteResponse(block_changes=change))

    def tell(self, **event: Any) -> None:
        """Say something of the worker itself on all streams."""
        for events in self.streams:
            events.put_nowait(pb.ExecuteResponse(**event))

    def tell_all(self) -> None:
        """Say everything anew, unasked."""
        for events in self.streams:
            self._tell_all_blocks(events)

    def _tell_all_blocks(self, events: Any) -> None:
        self.num_watches += 1
        snapshot = pb.BlockSnapshot(
            sequence=self.num_watches * 100,
            first=True,
            hashes=b"".join(self.blocks),
            engine=self.profile,
        )
        events.put_nowait(pb.ExecuteResponse(block_snapshot=snapshot))

    async def _read(self, commands: Any, events: Any, group: asyncio.TaskGroup) -> None:
        running: dict[tuple[str, int], asyncio.Task[None]] = {}
        try:
            async for command in commands:
                if command.WhichOneof("command") == "submit":
                    submit = command.submit
                    self.submits.append(submit)
                    task = group.create_task(self._answer(submit, events))
                    running[submit.request_id, submit.attempt] = task
                elif command.WhichOneof("command") == "watch_blocks":
                    self._tell_all_blocks(events)
                else:
                    cancel = command.cancel
                    self.cancels.put_nowait(cancel)
                    running[cancel.request_id, cancel.attempt].cancel()
        finally:
            for task in running.values():
                task.cancel()

    async def _answer(self, submit: pb.Submit, events: Any) -> None:
        def emit(**event: Any) -> None:
            events.put_nowait(
                pb.ExecuteResponse(request_id=submit.request_id, attempt=submit.attempt, **event)
            )

        await self.script(submit, emit)

    async def start(self, port: int = 0) -> None:
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        attention_pb2_grpc.add_AttentionServiceServicer_to_server(self, self.server)
        bound = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"
        await self.server.start()

    async def kill(self) -> None:
        """Break all connections at once."""
        assert self.server is not None
        await self.server.stop(None)


class ListedFleet:
    """A registry view made by hand."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.version = 0
        self._changed = asyncio.Event()

    async def changed(self, since: int | None = None) -> None:
        if since is None or since == self.version:
            await self._changed.wait()

    def put(self, record: WorkerRecord) -> None:
        self.workers[record.worker_id] = record
        self._note()

    def drop(self, worker_id: str) -> None:
        del self.workers[worker_id]
        self._note()

    def _note(self) -> None:
        self.version += 1
        woken, self._changed = self._changed, asyncio.Event()
        woken.set()


@dataclass
class House:
    """A running gateway with its workers."""

    gateway: Gateway
    fleet: ListedFleet
    workers: list[ScriptedAttention]
    url: str
    client: httpx.AsyncClient
    logs: list[Any]
    num_marks: int = 0

    async def add(self, script: Script, generation: int = 1) -> ScriptedAttention:
        worker = ScriptedAttention(script)
        await worker.start()
        self.workers.append(worker)
        self.fleet.put(
            WorkerRecord(
                worker_id=f"attention-{len(self.workers)}",
                generation=generation,
                role="attention",
                state="ready",
                admin_address=worker.address,
                dispatch="local",
            )
        )
        await self.until(lambda: len(self.gateway.workers.accepting) >= len(self.fleet.workers))
        return worker

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition)

    async def heard(self, worker: ScriptedAttention) -> None:
        """Wait until the gateway has read all that a worker has said: it reads the number that is said last."""
        await until(lambda: worker.streams)
        await asyncio.sleep(0)  # what has just been submitted may say its first words now
        self.num_marks += 1
        worker.tell(others_work=pb.OthersWork(num_requests=self.num_marks))
        shadows = self.gateway.workers.routing.router.fleet.workers
        await until(lambda: any(s.others.num_requests == self.num_marks for s in shadows.values()))


@pytest.hookimpl(optionalhook=True)  # earlier versions of pytest-asyncio do not have it
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that gateways run in."""
    return {"uvloop": uvloop.new_event_loop}


OpenHouse = Callable[..., Any]


@pytest.fixture
def open_house(
    model_directory: Path, language: Language, monkeypatch: pytest.MonkeyPatch
) -> OpenHouse:
    """``async with open_house(script, ..., **settings) as house``: one worker per script.

    ``limits`` are other values of constants of the router.
    """
    usual = language

    @asynccontextmanager
    async def opened(
        *scripts: Script,
        language: Language = usual,
        limits: Mapping[str, float] = MappingProxyType({}),
        **settings: Any,
    ) -> AsyncIterator[House]:
        for name, value in limits.items():
            monkeypatch.setattr(routing, name, value)
        told = GatewaySettings(model=str(model_directory), port=0, **settings)
        gateway, fleet = Gateway(told, language), ListedFleet()
        app = make_app(gateway)
        async with AsyncExitStack() as parts:
            logs = parts.enter_context(capture_logs())
            address = await parts.enter_async_context(http_server(told, app))
            url = f"http://{address}"
            # A client that would check certificates reads those of all authorities, for 60 ms.
            client = await parts.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=HANG_S, verify=False)
            )
            house = House(gateway, fleet, [], url, client, logs)
            following = asyncio.create_task(gateway.workers.follow(fleet))
            carrying = asyncio.create_task(carry_out_batches(gateway, app))
            try:
                for script in scripts:
                    await house.add(script)
                yield house
            finally:
                following.cancel()
                carrying.cancel()
                await asyncio.gather(following, carrying, return_exceptions=True)
                for worker in house.workers:
                    await worker.kill()

    return opened


@dataclass
class Scripts:
    """Answers that many tests want."""

    language: Language

    def ids(self, text: str) -> list[int]:
        return self.language.tokenizer.encode(text, add_special_tokens=False)

    def text(self, token_id: int) -> str:
        return self.language.tokenizer.decode([token_id], skip_special_tokens=False)

    def says(self, text: str, *, gap_s: float = 0.0, stop: bool = True) -> Script:
        """Say a text, one token a message, from wherever the prompt already goes on."""
        token_ids = self.ids(text)

        async def script(submit: pb.Submit, emit: Emit) -> None:
            said = _overlap(list(submit.token_ids), token_ids) if submit.attempt > 1 else 0
            rest = token_ids[said:][: submit.generation.max_tokens]
            asked = submit.generation.HasField("top_logprobs")
            logprobs = [pb.TokenLogprob(logprob=-0.5)] if asked else []
            for index, token_id in enumerate(rest):
                emit(tokens=pb.Tokens(token_index=index, token_ids=[token_id], logprobs=logprobs))
                await asyncio.sleep(gap_s)
            emit(finished=self.finished(submit, len(rest), stop=stop))

        return script

    def begins(self, text: str) -> Script:
        """Say a text, and never end."""

        async def script(submit: pb.Submit, emit: Emit) -> None:
            for index, token_id in enumerate(self.ids(text)):
                emit(tokens=pb.Tokens(token_index=index, token_ids=[token_id]))

        return script

    def finished(self, submit: pb.Submit, count: int, *, stop: bool = True) -> pb.Finished:
        end = self.language.config.eos_token_ids[0] if stop else None
        asked = stop and submit.generation.HasField("top_logprobs")
        return pb.Finished(
            reason=pb.FINISH_REASON_STOP if stop else pb.FINISH_REASON_LENGTH,
            prompt_tokens=len(submit.token_ids),
            completion_tokens=count + int(stop),
            epochs=[pb.EpochSpan(epoch=3, tokens=count)],
            stop_token_id=end,
            stop_logprob=pb.TokenLogprob(logprob=-0.25) if asked else None,
            degradation=pb.Degradation(mean_threshold=1.0, rows=len(submit.token_ids)),
        )

    def scores(self, *logprobs: float) -> Script:
        async def script(submit: pb.Submit, emit: Emit) -> None:
            emit(scores=pb.Scores(logprobs=logprobs[: len(submit.scoring.candidates)]))
            emit(finished=self.finished(submit, 0, stop=False))

        return script

    @staticmethod
    def pools(*vectors: Sequence[float]) -> Script:
        """One vector a request, in their order."""
        left = iter(vectors)

        async def script(submit: pb.Submit, emit: Emit) -> None:
            emit(pooled=pb.Pooled(values=np.asarray(next(left), "<f4").tobytes()))
            count = len(submit.token_ids)
            reason = pb.FINISH_REASON_STOP
            emit(finished=pb.Finished(reason=reason, prompt_tokens=count, cached_tokens=2))

        return script

    def fails(self, **failure: Any) -> Script:
        async def script(submit: pb.Submit, emit: Emit) -> None:
            emit(failure=pb.Failure(**failure))

        return script

    @staticmethod
    async def anything(submit: pb.Submit, emit: Emit) -> None:
        """Answer anything at once: with one token, with scores, or with a vector."""
        if submit.HasField("embedding"):
            values = np.ones(CONFIG["hidden_size"], "<f4").tobytes()
            emit(pooled=pb.Pooled(values=values))
        elif submit.HasField("scoring"):
            emit(scores=pb.Scores(logprobs=[-1.0] * len(submit.scoring.candidates)))
        else:
            emit(tokens=pb.Tokens(token_ids=[5]))
        emit(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH, completion_tokens=1))

    @staticmethod
    async def silent(submit: pb.Submit, emit: Emit) -> None:
        """Never answer."""


@pytest.fixture
def scripts(language: Language) -> Scripts:
    return Scripts(language)


def _overlap(prompt: list[int], answer: list[int]) -> int:
    """How much of an answer a prompt ends with."""
    return max(
        (n for n in range(len(answer) + 1) if prompt[len(prompt) - n :] == answer[:n]), default=0
    )
