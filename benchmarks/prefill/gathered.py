"""Costs of gathering experts layer by layer: time that layers wait, and memory, against resident experts.

``python -m benchmarks.prefill.gathered`` makes a random model of twelve layers, about 340 MB of
experts in float32. It runs prefill steps of several sizes with experts resident, offloaded,
gathered from a second process, and both. It prints a table, and the memory used against its plan.
"""

import argparse
import asyncio
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

ROWS = (16, 128, 512, 2048)
STEPS = 3  # of each size; the middle one counts
SECRET = b"benchmark"
CODE = (
    "moesaic.dispatch.baselines.all_to_all",
    "moesaic.dispatch.gathered.assembly",
    "moesaic.dispatch.local",
    "moesaic.engine.thread",
    "moesaic.transport.ucx.network",
)


def make_model(directory: Path) -> None:
    """Make a random Qwen3-MoE checkpoint whose experts no cache holds."""
    from benchmarks.common.models import MIDDLE, write_model

    write_model(directory, MIDDLE, "float32")


async def worker(arguments: argparse.Namespace) -> None:
    """Run one process: it holds its share, and runs steps if it is the first, or if all are to."""
    import torch

    from moesaic.models.configuration.config import load_config
    from moesaic.models.layers.decoder import Decoder
    from moesaic.models.weights.checkpoint import Checkpoint
    from moesaic.native.own_thread import on_own_thread

    torch.set_num_threads(1)
    directory = Path(arguments.model)
    config, checkpoint = load_config(directory), Checkpoint(directory)
    decoder = Decoder.load(checkpoint, config, torch.float32, torch.device("cpu"))
    async with AsyncExitStack() as parts:
        # This, and what torch needs for a start, is not the experts'.
        for code in CODE:
            importlib.import_module(code)
        await run_step(decoder, Nothing(), 16)
        # Gives back what reading the decoder has freed.
        await on_own_thread(int)
        memory = Memory()
        opened = open_all_to_all if arguments.all_to_all else open_gathered
        dispatcher, planned = await opened(arguments, config, checkpoint, parts)
        if arguments.everybody or arguments.share.startswith("0/"):
            results = [await run_step(decoder, dispatcher, 16)]
            results[0]["memory_bytes"] = memory.peak()
            with torch.inference_mode():
                for rows in arguments.rows:
                    runs = [await run_step(decoder, dispatcher, rows) for _ in range(STEPS)]
                    results.append(sorted(runs, key=lambda run: run["step_s"])[STEPS // 2])
            print(json.dumps(planned | {"results": results}), flush=True)
        # Until everybody is done.
        await asyncio.to_thread(sys.stdin.readline)


async def open_gathered(
    arguments: argparse.Namespace, config: Any, checkpoint: Any, parts: AsyncExitStack
) -> tuple[Any, dict[str, int]]:
    """Open the dispatcher of a mode; returns its planned bytes as well."""
    import torch

    from moesaic.dispatch.gathered.assembly import assemble
    from moesaic.dispatch.gathered.holders import ShareHolders
    from moesaic.dispatch.gathered.plan import plan_gather
    from moesaic.dispatch.local import LocalDispatcher
    from moesaic.engine.thread import engine_thread
    from moesaic.experts.loaded import ExpertFiles
    from moesaic.experts.pull.frames import PULL_LIMITS
    from moesaic.experts.pull.ranges import Share
    from moesaic.kernels.expert_layout import ExpertLayout
    from moesaic.models.layers.gate import load_gates
    from moesaic.transport.ucx.network import UcxNetwork

    cpu, share = torch.device("cpu"), Share.parse(arguments.share)
    layout = ExpertLayout(config.hidden_size, config.moe.expert_size, torch.float32)
    plan = plan_gather(
        config.moe_layers,
        config.moe.num_experts,
        layout.nbytes,
        share=share,
        offload=arguments.offload,
        window=arguments.window,
    )
    planned = {"planned_bytes": plan.total_bytes, "resident_bytes": plan.resident_bytes}
    if arguments.resident:
        return LocalDispatcher(checkpoint, config, torch.float32, cpu), planned
    thread = await parts.enter_async_context(engine_thread(cpu, "mover"))

    async def open_network() -> UcxNetwork:
        return UcxNetwork(f"worker-{share.index}", "attention", SECRET, PULL_LIMITS)

    network = await thread.run(open_network()) if share.count > 1 else None
    if network is not None:
        parts.push_async_callback(lambda: thread.run(network.close()))
    assembled = await parts.enter_async_context(
        assemble(
            plan,
            ExpertFiles(checkpoint, config, torch.float32, cpu),
            load_gates(checkpoint, config, torch.float32, cpu),
            thread.run,
            model_digest=config.digest,
            directory=Path(arguments.model) / "offloaded",
            network=network,
        )
    )
    if network is not None:
        address = await thread.run(network.listen("127.0.0.1", 0, assembled.server.answer))
        assert isinstance(assembled.holders, ShareHolders)
        thread.call(assembled.holders.set_peers, await meet(address, share))
        await thread.run(assembled.holders.complete())
    assembled.dispatcher.prime()
    return assembled.dispatcher, planned


async def open_all_to_all(
    arguments: argparse.Namespace, config: Any, checkpoint: Any, parts: AsyncExitStack
) -> tuple[Any, dict[str, int]]:
    """Open the baseline's dispatcher; no memory is planned for it."""
    import torch

    from moesaic.dispatch.baselines.all_to_all import AllToAllDispatcher
    from moesaic.experts.pull.ranges import Share
    from moesaic.transport.frame import FrameLimits
    from moesaic.transport.ucx.network import UcxNetwork

    share = Share.parse(arguments.share)
    dispatcher = AllToAllDispatcher(checkpoint, config, share, torch.float32)
    limits = FrameLimits.of_hidden_size(config.hidden_size)
    network = UcxNetwork(f"worker-{share.index}", "attention", SECRET, limits)
    parts.push_async_callback(network.close)
    dispatcher.connect(network, timeout_s=60)
    parts.push_async_callback(dispatcher.close)
    address = await network.listen("127.0.0.1", 0, dispatcher.answer)
    dispatcher.set_peers(await meet(address, share))
    await dispatcher.reachable()
    return dispatcher, {}


async def meet(address: str, share: Any) -> list[Any]:
    """Tell the parent where this worker listens, and learn where the others do."""
    from moesaic.dispatch.gathered.peers import Peer
    from moesaic.experts.pull.ranges import Share

    print(json.dumps({"address": address}), flush=True)
    others = json.loads(await asyncio.to_thread(sys.stdin.readline))
    return [Peer(f"worker-{index}", 1, at, Share(index, share.count)) for index, at in others]


async def run_step(decoder: Any, dispatcher: Any, rows: int) -> dict[str, float]:
    """Run one prefill step of ``rows`` rows."""
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
        """Begin nothing."""

    def end_step(self, step: None) -> None:
        """End nothing."""

    async def dispatch(self, step: None, layer: int, hidden_states: Any) -> Any:
        """Return the rows as they are."""
        return hidden_states


class Memory:
    """Growth of this process's memory, at its most."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._start = _status("VmRSS")

    def peak(self) -> int:
        """Bytes since this was made."""
        return _status("VmHWM") - self._start


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def run_mode(
    model: Path, mode: str, window: int = 1, rows: Sequence[int] = ROWS, everybody: bool = False
) -> list[dict[str, Any]]:
    """Figures of the workers of a mode that run steps: the first, or all."""
    count, flags = MODES[mode]
    count = WORKERS if everybody else count
    command = [sys.executable, "-m", "benchmarks.prefill.gathered", "--model", str(model), *flags]
    command += ["--rows", *map(str, rows), "--window", str(window)]
    command += ["--everybody"] if everybody else []
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
        if count > 1 and "--resident" not in flags:
            addresses = [
                (index, json.loads(_line(process))["address"])
                for index, process in enumerate(processes)
            ]
            for index, process in enumerate(processes):
                _tell(process, json.dumps([a for a in addresses if a[0] != index]))
        return [json.loads(_line(process)) for process in processes[: None if everybody else 1]]
    finally:
        for process in processes:
            _tell(process, "done")
        for process in processes:
            # Closes its pipes, too.
            process.communicate(timeout=30)


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


WORKERS = 2
MODES: dict[str, tuple[int, list[str]]] = {  # workers, flags of each
    "resident": (1, ["--resident"]),
    "offload": (1, ["--offload"]),
    "gathered": (WORKERS, []),
    "gathered+offload": (WORKERS, ["--offload"]),
    "all-to-all": (WORKERS, ["--all-to-all"]),
}


def report(mode: str, workers: list[dict[str, Any]]) -> None:
    """Print a mode's figures: of one worker, or of all together."""
    first = workers[0]
    memory = f"{first['results'][0]['memory_bytes'] / 1e6:.1f} MB"
    if mode != "all-to-all":
        planned = first["resident_bytes" if mode == "resident" else "planned_bytes"]
        memory += f", planned {planned / 1e6:.1f} MB"
    print(f"{mode}, {len(workers)} workers with steps: memory of a worker's experts {memory}")
    for runs in zip(*(worker["results"][1:] for worker in workers), strict=True):
        step_s = max(run["step_s"] for run in runs)
        wait_s = max(run["wait_s"] for run in runs)
        print(
            f"  {runs[0]['rows']:5.0f} rows: {1e3 * step_s:8.1f} ms a step, "
            f"{1e3 * wait_s:7.2f} ms of it waiting for experts, "
            f"{sum(run['rows'] / run['step_s'] for run in runs):7.0f} rows/s in all"
        )


def main() -> None:
    """Run all modes, or one process of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="directory to use; made if it is empty")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--window", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--everybody", action="store_true", help="all workers run steps at once")
    # Of one process
    for name in ("resident", "offload", "all-to-all"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)
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
            report(
                mode,
                run_mode(model, mode, arguments.window, arguments.rows, arguments.everybody),
            )


if __name__ == "__main__":
    main()
