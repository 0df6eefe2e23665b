"""llama.cpp as a side of ``moesaic bench engine``."""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.engine.gguf import write_gguf
from benchmarks.engine.peers import MAX_TOKENS, Server, free_port, running, taking_turns
from benchmarks.engine.sides import Prompt, Prompts, Side, streamed

COMPLETION = "/completion"  # its own path: each event says how many tokens there are


@contextmanager
def llama_cpp_side(python: str, checkpoint: Path, slots: int) -> Iterator[Side]:
    """llama.cpp's own server, asked over REST, ``slots`` sequences at once."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model.gguf"
        write_gguf(checkpoint, model)
        with gguf_side(python, model, slots) as side:
            yield side


@contextmanager
def gguf_side(python: str, model: Path, slots: int) -> Iterator[Side]:
    """The same, of a GGUF file."""

    def asked(prompt: Any, num_tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "ignore_eos": True}

    def generate(prompts: Prompts, num_tokens: int) -> None:
        response = client.post(COMPLETION, json=asked(prompts, num_tokens))
        response.raise_for_status()
        answers = response.json() if len(prompts) > 1 else [response.json()]
        assert [answer["tokens_predicted"] for answer in answers] == [num_tokens] * len(prompts)

    def stream(prompt: Prompt, num_tokens: int) -> list[float]:
        warm_up, whole = asked(prompt[::-1], 1), {**asked(prompt, num_tokens), "stream": True}
        times = token_times(streamed(client, COMPLETION, warm_up, whole))
        assert len(times) == num_tokens, f"{len(times)} tokens came, {num_tokens} were asked for"
        return times

    with llama_cpp_server(python, model, slots) as (server, client):
        yield taking_turns(server, Side(generate, stream))


@contextmanager
def llama_cpp_server(python: str, model: Path, slots: int, kv: str = "f16") -> Iterator[Server]:
    """A server of a GGUF file, in a Python that has ``xllamacpp``; ``kv`` is how it keeps keys and values."""
    port = free_port()
    flags = {
        "--model": str(model),
        "--port": str(port),
        "--slots": str(slots),
        "--slot-tokens": str(MAX_TOKENS),
        "--kv": kv,
    }
    command = [python, str(Path(__file__).with_name("llama_cpp_server.py")), *chain(*flags.items())]
    with running("llama.cpp", command, port, {}) as server:
        yield server


def token_times(events: list[tuple[float, bytes]]) -> list[float]:
    """Seconds of each token: one that ends within a character comes together with the next."""
    times: list[float] = []
    for at, event in events:
        so_far = json.loads(event)["tokens_predicted"]
        times += [at] * (so_far - len(times))
    return times


def llama_cpp_build(python: str) -> str:
    """Version of the package, and the instructions that its llama.cpp was compiled for."""
    code = (
        "import importlib.metadata as m, xllamacpp; "
        "print('xllamacpp', m.version('xllamacpp'), xllamacpp.get_system_info())"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip(" |\n")
