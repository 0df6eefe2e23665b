"""Compiles the kernels; needs nothing but Python and a C compiler.

``python compile.py`` compiles for this machine, into the user's cache, where it is looked for.
``python compile.py DIR`` compiles for every kind of processor, for an image that is built on one
machine and runs on others.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Variant(NamedTuple):
    """One kind of processor.

    Attributes:
        features: features that it must have.
        flags: flags of the compiler.
        panel: outputs of a matrix that lie side by side, as ``vector.h`` has it.
    """

    features: frozenset[str]
    flags: list[str]
    panel: int


# The richest first. Files are named by them, so that machines of several kinds can share a directory.
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
VARIANTS = {
    "avx512-vnni": Variant(_AVX512 | {"avx512_vnni"}, ["-march=x86-64-v4", "-mavx512vnni"], 64),
    "avx512": Variant(_AVX512, ["-march=x86-64-v4"], 64),
    "avx2": Variant(frozenset({"avx2", "fma", "bmi2"}), ["-march=x86-64-v3"], 16),
    "any": Variant(frozenset(), [], 16),
}
# The compiler may not fuse a product and a sum: it would do so by what surrounds them.
_FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-pthread", "-fPIC", "-fvisibility=hidden"]
_SOURCES = Path(__file__).parent / "sources"
_BUILT = Path(__file__).parent / "built"  # where images have them


def cache_directory() -> Path:
    """Return the directory in which this user's processes keep results for later ones."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "moesaic"


def find(variant: str) -> Path:
    """Return the path of ``variant``, compiled now if it never was; raises as ``compile_into``."""
    name = _name(variant)
    home = cache_directory()
    for directory in (_BUILT, home):
        if (directory / name).exists():
            return directory / name
    return compile_into(home, variant)


def compile_into(directory: Path, variant: str) -> Path:
    """Compile ``variant``; the file appears whole or not at all.

    Raises:
        OSError: there is no compiler, or the directory cannot be written.
        CalledProcessError: the compiler failed; ``stderr`` says why.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise OSError("no C compiler found")
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / _name(variant)
    sources = sorted(_SOURCES.rglob("*.c"))
    compiled = [f"{source.stem}.o" for source in sources]
    with tempfile.TemporaryDirectory(dir=directory) as work:
        for arguments in (
            [*_FLAGS, *VARIANTS[variant].flags, f"-I{_SOURCES}", "-c", *map(str, sources)],
            ["-shared", "-pthread", "-o", target.name, *compiled],
        ):
            subprocess.run(
                [compiler, *arguments], cwd=work, check=True, capture_output=True, text=True
            )
        os.replace(Path(work) / target.name, target)
    return target


def this_variant() -> str:
    """Return the variant that ``MOESAIC_KERNELS`` names, else the richest that this processor can run.

    Raises:
        UnusableSettings: this processor cannot run the variant that is named.
    """
    runnable = [name for name in VARIANTS if can_run(name)]
    named = os.environ.get("MOESAIC_KERNELS") or runnable[0]
    if named not in runnable:
        # Imported here: images compile with this file alone.
        from moesaic.errors import UnusableSettings

        fix = f"must be one of {', '.join(runnable)} on this processor, got {named!r}"
        raise UnusableSettings("MOESAIC_KERNELS", fix)
    return named


def can_run(variant: str) -> bool:
    """Return true if this processor has what ``variant`` needs."""
    return not lacking(variant)


def lacking(variant: str) -> frozenset[str]:
    """Return the features of ``variant`` that this processor lacks."""
    return VARIANTS[variant].features - _processor_flags()


@cache
def _processor_flags() -> frozenset[str]:
    if os.uname().machine != "x86_64":
        return frozenset()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split())
    return frozenset()


@cache
def _name(variant: str) -> str:
    """Return a name for the compiled sources, so that no process ever loads another version."""
    digest = hashlib.sha256(repr((_FLAGS, VARIANTS[variant].flags)).encode())
    for source in sorted(_SOURCES.rglob("*.[ch]")):
        digest.update(source.read_bytes())
    return f"kernels-{variant}-{digest.hexdigest()[:16]}.so"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for each in VARIANTS if os.uname().machine == "x86_64" else ["any"]:
            print(compile_into(Path(sys.argv[1]), each))
    else:
        print(find(this_variant()))
