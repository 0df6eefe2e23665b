"""The first launch of a kernel on a GPU that is not there: Triton builds and loads what launches them.

Runs in a container, with Triton and what the image has. Only NVIDIA's driver is replaced, by a
library with the functions that Triton calls. They all answer that there is no device.
"""

import ctypes
import os
import re
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from triton.backends.nvidia import driver

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
SOURCE = Path(driver.dirname) / "driver.c"


def called_by(source: Path, directory: Path) -> list[str]:
    """Names of the driver's functions that a C file calls."""
    scheme = "posix_prefix"
    places = [*driver.include_dirs, sysconfig.get_path("include", scheme)]
    compiled = directory / "called.o"
    command = ["gcc", "-c", "-fPIC", str(source), "-o", str(compiled)]
    subprocess.run([*command, *(f"-I{place}" for place in places)], check=True)
    symbols = subprocess.run(
        ["nm", "--undefined-only", str(compiled)], capture_output=True, text=True, check=True
    )
    return re.findall(r"\bU (cu[A-Z]\w+)", symbols.stdout)


def make_driver(library: Path) -> None:
    """Build a driver without devices."""
    library.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "driver.c"
        functions = called_by(SOURCE, source.parent)
        source.write_text(
            "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in functions)
        )
        soname = f"-Wl,-soname,{library.name}"
        subprocess.run(
            ["gcc", "-shared", "-fPIC", soname, str(source), "-o", str(library)], check=True
        )


if __name__ == "__main__":
    # The volume of the cache is the one place to write to from which code may be loaded.
    library = Path(os.environ["TRITON_CACHE_DIR"]).parent / "driver" / "libcuda.so.1"
    if not library.exists():
        make_driver(library)
    ctypes.CDLL(str(library))
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    driver.CudaUtils()
    print("loaded")
