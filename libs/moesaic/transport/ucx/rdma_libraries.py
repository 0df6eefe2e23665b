"""A UCX with InfiniBand for ucxx: a directory of links to the libraries in the ``nixl-cu13`` wheel.

    python -m moesaic.transport.ucx.rdma_libraries DIRECTORY
    export LD_LIBRARY_PATH=DIRECTORY RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true

The UCX that ucxx brings has no InfiniBand. That of ``nixl-cu13`` has it, but its files have names of their own, such as
``libucp-b39b3ed9.so.0.0.0``, and ucxx looks for ``libucp.so.0``. UCX finds its modules beside the library, by the
ending of the name under which the library was loaded. Needs Python only; without the wheel it says so, and changes
nothing.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

WHEELS = ("nixl_cu13", "nixl_cu12")
UCX = ("libucm", "libucs", "libuct", "libucp")
# ucxx loads it, too, and would load a second UCX with it. A program needs it only to print its own crash.
ABSENT = {"libucs_signal": "libucs"}
_OWN_NAME = re.compile(r"(lib\w+)-[0-9a-f]{8}\.so")


def main() -> None:
    """Write the links into the directory that the command line names."""
    if len(sys.argv) != 2:
        sys.exit(f"{Path(sys.argv[0]).name}: name one directory for the links")
    libraries = libraries_of_wheel()
    if libraries is None:
        print(f"none of {', '.join(WHEELS)} is installed: UCX stays without InfiniBand")
        return
    link(libraries, Path(sys.argv[1]))
    print(f"links to the UCX in {libraries} are in {sys.argv[1]}")


def libraries_of_wheel() -> Path | None:
    """Find the directory of the wheel's libraries; None: no wheel with InfiniBand is installed."""
    for wheel in WHEELS:
        spec = find_spec(wheel)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            libraries = Path(place).with_name(f"{wheel}.libs")
            if any(libraries.glob("ucx/libuct_ib.so*")):
                return libraries
    return None


def link(libraries: Path, directory: Path) -> None:
    """Write the links; links of an earlier call go.

    Args:
        libraries: of the wheel.
        directory: made if it is not there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for old in (*directory.glob("*.so*"), *directory.glob("ucx/*.so*")):
        old.unlink()
    (directory / "ucx").mkdir(exist_ok=True)
    for file in libraries.glob("*.so*"):
        # Under its own name as well, by which the others ask for it.
        (directory / file.name).symlink_to(file)
        found = _OWN_NAME.match(file.name)
        names = [found[1]] if found and found[1] in UCX else []
        names += [name for name, real in ABSENT.items() if real in names]
        for name in names:
            for ending in (".so", ".so.0"):
                (directory / f"{name}{ending}").symlink_to(file)
    for file in libraries.glob("ucx/*.so*"):
        stem = file.name.partition(".so")[0]
        for name in {file.name, f"{stem}.so", f"{stem}.so.0"}:
            (directory / "ucx" / name).symlink_to(file)


if __name__ == "__main__":
    main()
