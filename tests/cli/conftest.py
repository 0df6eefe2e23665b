"""A directory with a model and stand-in services, and the command run in it as users run it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from moesaic.cli.machine.state import StateFile, SuiteState, process_start_time
from moesaic.cli.main import main
from tests.waiting import HANG_S, eventually

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

# What a service does as far as its supervisor sees: it lives, logs, answers, and ends on SIGTERM.
STAND_IN = """
import json, os, signal, sys, time
name = sys.argv[sys.argv.index("--worker-id") + 1]
def log(event, level="info"):
    print(json.dumps({"level": level, "event": event, "t": time.monotonic()}), flush=True)
def stop(*_):
    log("service.stopping")
    if os.environ.get("STUCK") == name:
        return
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
log("service.started")
log("flags " + " ".join(sys.argv[1:]))
log("threads " + os.environ.get("OMP_NUM_THREADS", ""))
if os.environ.get("BROKEN") == name:
    print("cannot read the weights", flush=True)
    sys.exit(int(os.environ.get("BROKEN_STATUS", "1")))
if os.environ.get("WARNING") == name:
    log("disk.slow", "warning")
if "gateway" in name:
    import http.server
    ready = os.environ.get("NEVER_READY") is None
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if ready else 503)
            self.end_headers()
            failing = {} if ready else {"attention_workers": "no attention worker"}
            self.wfile.write(json.dumps({"failing": failing}).encode())
        def log_message(self, *_): pass
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
while True:
    signal.pause()
"""

LIBRARY = Path(__file__).parents[2] / "libs/moesaic"

T = TypeVar("T")
Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if "REDIS_URL" not in k and "MOESAIC" not in k}
    return {**clean, **more}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "moesaic.cli", *arguments]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A directory with a model at ``model`` and stand-ins for the services."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    weights = {"model.embed_tokens.weight": torch.zeros(64, 32)}  # what no model has is refused
    save_file(weights, tmp_path / "model" / "model.safetensors")
    Tokenizer(BPE()).save(str(tmp_path / "model" / "tokenizer.json"))
    for role in ("gateway", "scheduler", "attention", "expert", "edge_agent"):
        package = tmp_path / "moesaic" / "services" / role
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(STAND_IN)
        [settings] = (LIBRARY / "services" / role).glob("settings*")
        (package / settings.name).symlink_to(settings)
    (tmp_path / "moesaic" / "services" / "__init__.py").touch()
    for room in LIBRARY.iterdir():  # all else is the library itself
        if room.name not in ("services", "__pycache__"):
            (tmp_path / "moesaic" / room.name).symlink_to(room)
    return tmp_path


@pytest.fixture
def run(house: Path) -> Run:
    """Run the command in the house to its end."""

    def run(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command(*arguments),
            cwd=house,
            env=environment(**env),
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )

    return run


@pytest.fixture
def ask(house: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in the house, but within this process: quicker, for what starts nothing."""

    def ask(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        monkeypatch.chdir(house)
        monkeypatch.setattr(sys, "argv", ["moesaic", *arguments])
        monkeypatch.setattr(os, "environ", environment(**env))
        status: object = 0
        try:
            main()
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        assert isinstance(status, int)
        return subprocess.CompletedProcess(arguments, status, out, err)

    return ask


@pytest.fixture
def start(house: Path) -> Iterator[Start]:
    """Start the command in the house; what is left of it at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **env: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            command(*arguments),
            cwd=house,
            env=environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def suite(house: Path) -> Callable[[str], SuiteState]:
    """Wait until the suite in the house has reached a state."""

    def wait(state: str) -> SuiteState:
        def found() -> SuiteState | None:
            running = StateFile(house / "run").running()
            return running if running is not None and running.state == state else None

        return eventually(found)

    return wait


def gone(pids: list[int]) -> bool:
    """Whether none of these processes lives."""
    return all(process_start_time(pid) is None for pid in pids)
