"""A model of the Hugging Face hub as a directory of this machine: found in the hub's cache, or downloaded to it.

Cache, token, address and offline mode are those of ``huggingface_hub``, by its variables (``HF_HOME``, ``HF_TOKEN``,
``HF_ENDPOINT``, ``HF_HUB_OFFLINE``). It takes a lock for each file, so processes that start together download each file
once, and what a broken download has finished is kept. Needs no torch.
"""

import errno
import glob
import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.errors import MoesaicError, NotReady, UnusableSettings
from moesaic.model_names import Repository, repository_of
from moesaic.models.weights.files import INDEX_FILE, SINGLE_FILE, read_index

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

# All but the weights that a service reads. Others, such as pickles, are never asked for.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "moesaic.json",
    INDEX_FILE,
)
OnBytes = Callable[[int, int], None]  # bytes that have come, bytes in all
FIELD = "--model"
_MIB = 1 << 20
_READ_BYTES = 1 << 24
_READERS = 4  # files whose digests are computed at once
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NOT_OURS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def local_model(model: str, *, weights: bool = True, on_bytes: OnBytes | None = None) -> Path:
    """Find the directory of a model; download what is missing of a repository.

    Args:
        model: a directory, ``owner/name`` or ``owner/name@revision``.
        weights: download its weights too; else only the files for reading texts.
        on_bytes: called with the progress of a download of weights, from any thread.

    Returns:
        ``model`` itself if it is not the name of a repository; then it need not exist.

    Raises:
        UnusableSettings: the repository or revision does not exist, denies access, has no
            safetensors, does not fit on the disk, or is not cached while the process is offline.
        NotReady: the hub cannot be reached, or a download broke off; a retry may succeed.
        CheckpointError: its index is damaged.
    """
    repository = repository_of(model)
    if repository is None:
        return Path(model)
    with _said_plainly(repository):
        directory = _download(repository, repository.revision, SMALL_FILES)
        if not (directory / "config.json").is_file():
            raise UnusableSettings(FIELD, f"{repository} has no config.json, so it is not a model")
        if weights:
            _bring_weights(repository, directory, on_bytes)
    return directory


def _bring_weights(repository: Repository, directory: Path, on_bytes: OnBytes | None) -> None:
    """Download the weights that are not in ``directory`` yet, which is named by its commit."""
    from huggingface_hub import HfApi

    index = directory / INDEX_FILE
    files = sorted(set(read_index(index).values())) if index.is_file() else [SINGLE_FILE]
    missing = [file for file in files if not (directory / file).is_file()]
    if not missing:
        return
    api = HfApi(library_name="moesaic")
    found: Sequence[RepoFile] = api.get_paths_info(  # type: ignore[assignment]  # none of them is a folder
        repository.name, missing, revision=directory.name
    )
    if absent := sorted(set(missing) - {file.path for file in found}):
        raise UnusableSettings(
            FIELD,
            f"{repository} has no {absent[0]}; weights are read from safetensors alone, never from pickles: choose a "
            "repository that has them, or convert these",
        )
    total = sum(file.size for file in found)
    _require_room(repository, directory, total)
    _download(repository, directory.name, missing, on_bytes, total)
    _verify(repository, directory, found)


def _download(
    repository: Repository,
    revision: str,
    files: Sequence[str],
    on_bytes: OnBytes | None = None,
    total: int = 0,
) -> Path:
    """Bring those of ``files`` that the repository has into the cache; none that is there already."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repository.name,
            revision=revision or None,
            allow_patterns=[glob.escape(file) for file in files],
            tqdm_class=_telling(on_bytes, total),
            library_name="moesaic",
        )
    )


def _telling(on_bytes: OnBytes | None, total: int) -> Any:
    """Make the class of the hub's progress bars: it shows nothing, and tells how many bytes there are."""
    from huggingface_hub.utils.tqdm import tqdm

    most, lock = 0, threading.Lock()

    class Telling(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._of_bytes, self._come = kwargs.get("unit") == "B", 0
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]  # it has no types

        def update(self, n: float | None = 1) -> None:
            nonlocal most
            if not self._of_bytes or on_bytes is None:
                return
            # Files come side by side, and bytes are counted by more than one bar.
            with lock:
                self._come += int(n or 0)
                most = max(most, self._come)
                on_bytes(min(most, total), total)

    return Telling


def _require_room(repository: Repository, directory: Path, total: int) -> None:
    free = shutil.disk_usage(directory).free
    if total > free:
        raise UnusableSettings(
            FIELD,
            f"{repository}: {total / _MIB:,.0f} MiB are to be downloaded, and {free / _MIB:,.0f} MiB are free at "
            f"{_cache()}; make room, or set HF_HOME to a directory on a larger disk",
        )


def _verify(repository: Repository, directory: Path, files: Sequence["RepoFile"]) -> None:
    """Compare downloaded files with the digests that the hub has for them; remove those that differ."""
    stored = [(directory / file.path, file.lfs.sha256) for file in files if file.lfs is not None]
    with ThreadPoolExecutor(_READERS) as readers:
        digests = readers.map(_digest, [path for path, _ in stored])
        wrong = [
            path for (path, sha256), found in zip(stored, digests, strict=True) if found != sha256
        ]
    for path in wrong:
        # What the snapshot's entry points to.
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    if wrong:
        names = ", ".join(path.name for path in wrong)
        raise NotReady(
            f"{FIELD} {repository}: {names} arrived damaged, unlike its digest at the hub, and is removed; try again"
        )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return str(HF_HUB_CACHE)


@contextmanager
def _said_plainly(repository: Repository) -> Iterator[None]:
    """Turn errors of ``huggingface_hub`` into ours, which say what to do."""
    from huggingface_hub import errors
    from huggingface_hub.constants import ENDPOINT, is_offline_mode

    def unusable(problem: str) -> UnusableSettings:
        return UnusableSettings(FIELD, f"{repository}: {problem}")

    try:
        yield
    except MoesaicError:
        raise
    except errors.GatedRepoError as error:
        raise unusable(
            f"this repository is gated; accept its terms at {ENDPOINT}/{repository.name}, and set HF_TOKEN to a "
            "token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise unusable(
            f"no such directory here, and no such repository at {ENDPOINT}; correct the name, or, if it "
            "is private, set HF_TOKEN to a token that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise unusable(
            f"the repository has no revision {repository.revision!r}; give a branch, a tag or a commit of it"
        ) from error
    except errors.HFValidationError as error:
        raise unusable(f"is not a name of a repository: {error}") from error
    except (
        Exception
    ) as error:  # its HTTP client, and with it the class of errors, differs by version
        if is_offline_mode():
            raise unusable(
                f"is not completely in the cache ({_cache()}), and HF_HUB_OFFLINE forbids downloads; unset "
                "it, or set HF_HOME to the directory that has it"
            ) from error
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise unusable(
                f"the disk of {_cache()} is full; free space, or set HF_HOME to a directory on a larger one"
            ) from error
        if isinstance(error, OSError) and error.errno in _NOT_OURS:
            raise unusable(
                f"{error.filename} cannot be written; set HF_HOME to a directory of this user"
            ) from error
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in (401, 403):
            raise unusable(
                f"{ENDPOINT} refuses the token; set HF_TOKEN to one that is valid and may read it"
            ) from error
        raise NotReady(
            f"{FIELD} {repository}: {ENDPOINT} cannot be reached, or broke off ({_first_line(error)}); repeat the "
            "command to fetch the missing files, or give a directory"
        ) from error


def _first_line(error: BaseException) -> str:
    """Write the cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split("\n", 1)[0].split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
