"""Compiles the C sources together with their drivers, so that sanitizers watch them."""

import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from moesaic.native import header
from moesaic.native.compile import VARIANTS
from tests.native.kept import kept

HERE = Path(__file__).parent
SOURCES = header.HEADER.parent
# Attention meets nothing that other processes send.
LEFT_OUT = {"apart", "attention", "attention_tile", "decoder_step", "grouped_query"}
SHARED = ("chance", "layer", "messages", "pair", "reply")  # by both drivers
# Functions that the driver has for itself: time goes on as it wants.
WRAPPED = ("now_ns", "ppoll", "epoll_wait", "channel_core")

FLAGS = ["-O1", "-g", "-std=gnu11", "-ffp-contract=off", "-pthread", "-fno-omit-frame-pointer"]
FLAGS += ["-U_FORTIFY_SOURCE", "-Wno-psabi"]
MEMORY = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
RACES = ["-fsanitize=thread", "-Wno-tsan"]  # it warns that it knows no fences


@cache
def missing(sanitizer: str) -> str | None:
    """Say why nothing can be compiled and run with ``-fsanitize=sanitizer``; ``None``: it can."""
    if shutil.which("gcc") is None:
        return "there is no gcc"
    with TemporaryDirectory() as folder:
        program = Path(folder) / "nothing"
        program.with_suffix(".c").write_text("int main(void) { return 0; }")
        command = ["gcc", f"-fsanitize={sanitizer}", "-o", str(program), f"{program}.c"]
        if subprocess.run(command, capture_output=True).returncode:
            return f"gcc has no -fsanitize={sanitizer}"
        ran = subprocess.run([program], capture_output=True, text=True)
        return f"-fsanitize={sanitizer} does not run here: {ran.stderr}" if ran.returncode else None


def fuzz_driver(variant: str) -> Path:
    """Compile the driver of ``tests/native/fuzz`` for a variant of processor."""
    drivers = sorted((HERE / "fuzz").glob("*.c"))
    wrap = "-Wl," + ",".join(f"--wrap={name}" for name in WRAPPED)
    return _linked(f"fuzz-{variant}", drivers, [*MEMORY, *VARIANTS[variant].flags], [wrap])


def threads_driver(variant: str) -> Path:
    """Compile the driver of ``tests/native/threads`` for a variant of processor."""
    drivers = sorted((HERE / "threads").glob("*.c"))
    drivers += [HERE / "fuzz" / f"{name}.c" for name in SHARED]
    return _linked(f"threads-{variant}", drivers, [*RACES, *VARIANTS[variant].flags], [])


def _linked(name: str, drivers: Sequence[Path], flags: list[str], more: list[str]) -> Path:
    """Compile and link the drivers and the sources, unless an earlier run did so with this compiler."""
    sources = [source for source in sorted(SOURCES.rglob("*.c")) if source.stem not in LEFT_OUT]
    headers = [header for top in (SOURCES, HERE) for header in sorted(top.rglob("*.h"))]
    command = ["gcc", *FLAGS, *flags, f"-I{SOURCES}", f"-I{HERE / 'fuzz'}"]

    def make(target: Path) -> None:
        def compiled(source: Path) -> Path:
            to = target.with_name(f"{source.parent.name}-{source.stem}.o")
            warned = ["-Wall", "-Wextra", "-Werror"] if source in drivers else []
            _run([*command, *warned, "-c", str(source), "-o", str(to)])
            return to

        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compiled, [*drivers, *sources]))
        _run([*command, "-o", str(target), *map(str, objects), *more, "-lm"])

    read = [each.read_bytes() for each in (*drivers, *sources, *headers)]
    how = repr((FLAGS, flags, more, _run(["gcc", "--version"])))
    return kept(name, [how.encode(), *read], make)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
