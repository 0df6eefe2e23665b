"""Packages of an installation: what a service needs beside the packages that every installation has."""

import re
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

import moesaic

CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyPI's torch for Linux is the one for CUDA
# One of them is where CUDA can be; torch takes seconds to look.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
_OF_CUDA = re.compile(r"-cu\d+$")


def missing_packages(*extras: str) -> list[str]:
    """List the packages of some extras that cannot be found, those of every installation too.

    Returns:
        Names of distributions, in order; none if Moesaic runs from a path and was never installed.
    """
    try:
        requirements = requires("moesaic") or []
    except PackageNotFoundError:
        return []
    return sorted(name for name in _named(requirements, {"", *extras}) if not _is_there(name))


def how_to_install(*extras: str, torch: bool = False) -> str:
    """Write the command that installs extras: of the sources in a clone, else of the published package.

    Args:
        extras: to install; none: all of them.
        torch: whether it brings torch, whose build depends on the machine.
    """
    brackets = f"[{','.join(sorted(set(extras) or {'all'}))}]"
    index = "" if has_driver() or not torch else f"--extra-index-url {CPU_INDEX} "
    clone = Path(moesaic.__file__).resolve().parents[2]
    if (clone / "constraints.txt").is_file():
        return f"pip install {index}-c constraints.txt -e '.{brackets}'"
    return f"pip install {index}'moesaic{brackets}'"


def has_driver() -> bool:
    """Tell whether this machine has a driver for NVIDIA's GPUs, without torch."""
    return any(Path(driver).exists() for driver in _DRIVERS)


def _named(requirements: list[str], extras: set[str]) -> set[str]:
    from packaging.requirements import Requirement

    found: set[str] = set()
    parsed = [Requirement(each) for each in requirements]
    while True:
        wanted = [
            each
            for each in parsed
            if each.marker is None or any(each.marker.evaluate({"extra": e}) for e in extras)
        ]
        # An extra can be made of others: moesaic[attention,expert].
        inner = {extra for each in wanted if each.name == "moesaic" for extra in each.extras}
        found = {each.name for each in wanted if each.name != "moesaic"}
        if inner <= extras:
            return found
        extras = extras | inner


def _is_there(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        # Another distribution may bring the module, such as ucxx of conda.
        return find_spec(_OF_CUDA.sub("", name).replace("-", "_")) is not None
    return True
