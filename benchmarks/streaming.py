"""What fetching experts layer by layer costs: time that layers wait, memory, against resident experts.

``python -m benchmarks.streaming`` makes a random model of twelve layers, about 340 MB of experts in
float32, and runs prefill steps of several sizes with experts resident, offloaded, gathered from a
second process, and both. It prints a table, and how near memory comes to the plan.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

ROWS = (16, 128, 512, 2048)
STEPS = 3  # of each size; the middle one counts
SHAPE = {
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
    "intermediate_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
SECRET = b"benchmark"


def make_model(directory: Path) -> None:
    """A random Qwen3-MoE checkpoint of ``SHAPE``."""
    from benchmarks.parity_cases import Case, build_reference

    build_reference(Case("qwen3_moe", "benchmark", SHAPE), directory)


async def worker(arguments: argparse.Namespace) -> None:
    """One process: holds its share, and runs the steps if it is the first."""
    import torch

    from moesaic.dispatch.gathered.holder import PULL_LIMITS
    from moesaic.dispatch.gathered.peers import Peer
    from moesaic.dispatch.gathered.plan import Share, plan_stream
    from moesaic.dispatch.gathered.shard import PackedExperts
    from moesaic.dispatch.gathered.streaming import streaming
    from moesaic.dispatch.local import LocalDispatcher
    from moesaic.engine.thread import engine_thread
    from moesaic.kernels.expert_layout import ExpertLayout
    from moesaic.kernels.own_thread import on_own_thread
    from moesaic.models.checkpoint import Checkpoint
    from moesaic.models.config import load_config
    from moesaic.models.decoder import Decoder
    from moesaic.models.gate import load_gates
    from moesaic.transport.ucx import UcxNetwork

    torch.set_num_threads(1)
    cpu, directory = torch.device("cpu"), Path(arguments.model)
    config, checkpoint = load_config(directory), Checkpoint(directory)
    decoder = Decoder.load(checkpoint, config, torch.float32, cpu)
    layout = ExpertLayout(config.hidden_size, config.moe.expert_size, torch.float32)
    share = Share.parse(arguments.share)
    plan = plan_stream(
        config.moe_layers,
        config.moe.num_experts,
        layout.nbytes,
        share=share,
        offload=arguments.offload,
        window=arguments.window,
    )
    async with AsyncExitStack() as parts:
        thread = await parts.enter_async_context(engine_thread(cpu, "mover"))
        network: UcxNetwork | None = None
        if share.count > 1:

            async def open_network() -> UcxNetwork:
                return UcxNetwork(f"worker-{share.index}", "attention", SECRET, PULL_LIMITS)

            network = await thread.run(open_network())
            parts.push_async_callback(lambda: thread.run(network.close()))
        await run_step(decoder, Nothing(), 16)  # what torch needs for a start is not the experts'
        await on_own_thread(int)  # gives back what reading the decoder has freed
        memory = Memory()
        if not arguments.offload and share.count == 1:
            dispatcher: Any = LocalDispatcher(checkpoint, config, torch.float32, cpu)
        else:
            streamed = await parts.enter_async_context(
                streaming(
                    plan,
                    PackedExperts(checkpoint, config, layout),
                    load_gates(checkpoint, config, torch.float32, cpu),
                    thread.run,
                    model_digest=config.digest,
                    directory=directory / "offloaded",
                    network=network,
                )
            )
            dispatcher = streamed.dispatcher
            if network is not None:
                listening = network.listen("127.0.0.1", 0, streamed.holder.answer)
                print(json.dumps({"address": await thread.run(listening)}), flush=True)
                peers = [
                    Peer(f"worker-{index}", 1, address, Share(index, share.count))
                    for index, address in json.loads(await asyncio.to_thread(sys.stdin.readline))
                ]
                thread.call(streamed.mover.set_peers, peers)
                await thread.run(streamed.mover.complete())
            dispatcher.prime()
        if share.index == 0:
            results = [await run_step(decoder, dispatcher, 16)]
            results[0]["memory_bytes"] = memory.peak()
            with torch.inference_mode():
                for rows in arguments.rows:
                    runs = [await run_step(decoder, dispatcher, rows) for _ in range(STEPS)]
                    results.append(sorted(runs, key=lambda run: run["step_s"])[STEPS // 2])
            report = {"planned_bytes": plan.total_bytes, "resident_bytes": plan.resident_bytes}
            print(json.dumps(report | {"results": results}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)  # until everybody is done


async def run_step(decoder: Any, dispatcher: Any, rows: int) -> dict[str, float]:
    """One prefill step of ``rows`` rows."""
    from moesaic.dispatch.gathered.measure import prompts

    batch, num_blocks = prompts(rows, 256, decoder.config.vocab_size)
    cache = decoder.new_kv_cache(num_blocks)
    step = dispatcher.begin_step()
    started = time.perf_counter()
    await decoder.forward(batch, cache, lambda layer, x: dispatcher.dispatch(step, layer, x))
    step_s = time.perf_counter() - started
    dispatcher.end_step(step)
    return {"rows": rows, "step_s": step_s, "wait_s": sum(getattr(dispatcher, "wait_s", ()))}


class Nothing:
    """A dispatcher without experts."""

    def begin_step(self) -> None:
        """Nothing to begin."""

    def end_step(self, step: None) -> None:
        """Nothing to end."""

    async def dispatch(self, step: None, layer: int, hidden_states: Any) -> Any:
        """The rows as they are."""
        return hidden_states


class Memory:
    """How far this process's memory has grown at most."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._start = _status("VmRSS")

    def peak(self) -> int:
        """Bytes, since this was made."""
        return _status("VmHWM") - self._start


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def run_mode(
    model: Path, count: int, offload: bool, window: int, rows: tuple[int, ...] = ROWS
) -> dict[str, Any]:
    """The steps of one mode, with ``count`` processes."""
    command = [sys.executable, "-m", "benchmarks.streaming", "--model", str(model)]
    command += [
        "--rows",
        *map(str, rows),
        "--window",
        str(window),
        *(["--offload"] if offload else []),
    ]
    processes = [
        subprocess.Popen(
            [*command, "--share", f"{index}/{count}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        if count > 1:
            addresses = [
                (index, json.loads(_line(process))["address"])
                for index, process in enumerate(processes)
            ]
            for index, process in enumerate(processes):
                _tell(process, json.dumps([a for a in addresses if a[0] != index]))
        return dict(json.loads(_line(processes[0])))
    finally:
        for process in processes:
            _tell(process, "done")
        for process in processes:
            process.wait(30)


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return line
    raise SystemExit(f"a worker failed with status {process.wait()}")


def _tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass


MODES = {
    "resident": (1, False),
    "offload": (1, True),
    "gathered": (2, False),
    "gathered+offload": (2, True),
}


def main() -> None:
    """Run all modes, or one process of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="of one worker, or what to use")
    parser.add_argument("--share", default="")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--window", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--modes", default=",".join(MODES))
    arguments = parser.parse_args()
    if arguments.share:
        asyncio.run(worker(arguments))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(arguments.model or temporary)
        if not (model / "config.json").exists():
            make_model(model)
        for mode in arguments.modes.split(","):
            found = run_mode(model, *MODES[mode], arguments.window, tuple(arguments.rows))
            memory, planned = found["results"][0]["memory_bytes"], found["planned_bytes"]
            if mode == "resident":
                planned = found["resident_bytes"]
            print(f"{mode}: memory {memory / 1e6:.1f} MB, planned {planned / 1e6:.1f} MB")
            for run in found["results"][1:]:
                print(
                    f"  {run['rows']:5.0f} rows: {1e3 * run['step_s']:8.1f} ms a step, "
                    f"{1e3 * run['wait_s']:7.2f} ms of it waiting for experts, "
                    f"{run['rows'] / run['step_s']:7.0f} rows/s"
                )


if __name__ == "__main__":
    main()
