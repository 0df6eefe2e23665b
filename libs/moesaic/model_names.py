"""Names of models: a directory, or a repository of the Hugging Face hub as ``owner/name``."""

import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import moesaic

# As the hub has them: two parts of letters, digits, ".", "_" and "-", none of which begins or ends with "." or "-".
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9_][A-Za-z0-9._/-]*))?")
# The hub's cache keeps a repository of models in such a directory, and each commit of it in one below.
_CACHED = re.compile(r"models--(.+?)--(.+)")
_SNAPSHOTS = "snapshots"
# Models of a clone are below this directory. Elsewhere their paths must not become names that anybody may register.
_OF_CLONES = "models"
_DEMO = Path(_OF_CLONES, "demo")
_PACKAGE = "moesaic-demo"  # has the model for those without a clone


class Repository(NamedTuple):
    """A model on the hub."""

    name: str  # owner/name
    revision: str  # a branch, a tag or a commit; empty: the main branch

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


def repository_of(model: str) -> Repository | None:
    """Read ``owner/name`` or ``owner/name@revision``.

    Returns:
        None for everything else, and for paths. A path names an existing directory, or is below ``models``.
        Without a revision, it may also be below any existing directory, as a typing error.
    """
    found = _REPOSITORY.fullmatch(model)
    if found is None or "--" in found[1] or ".." in found[1] or Path(model).is_dir():
        return None
    owner, revision = found[1].partition("/")[0], found[2] or ""
    if owner.lower() == _OF_CLONES or (not revision and Path(owner).is_dir()):
        return None
    return Repository(found[1], revision)


def demo_model() -> Path | None:
    """Find the demo model on this machine: in the present directory, in the clone that runs, or as a package."""
    places = [_DEMO, Path(moesaic.__file__).resolve().parents[2] / _DEMO]
    with suppress(PackageNotFoundError):
        places.append(Path(str(distribution(_PACKAGE).locate_file("moesaic_demo/demo"))))
    return next((path for path in places if path.is_dir()), None)


def name_of_model(model: str) -> str:
    """Give the name by which a model is served unless a setting says another.

    Returns:
        ``owner/name`` of a repository, also for its directory in the hub's cache; else the directory's
        name.
    """
    repository = repository_of(model)
    if repository is not None:
        return repository.name
    directory = Path(model).resolve()
    cached = _CACHED.fullmatch(directory.parent.parent.name)
    if cached and directory.parent.name == _SNAPSHOTS:
        return f"{cached[1]}/{cached[2]}"
    return directory.name
