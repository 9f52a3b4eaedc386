"""The user's cache folder: a place where several processes prepare a folder once and never see half of it.

Owner of the lock: `prepare_once`, for as long as it runs. The kernel drops the lock of a process that dies, so no lock file is ever stale.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pd_serve.errors import ModelError
from pd_serve.model_store.progress import Progress

_UNFINISHED_PREFIX = ".unfinished-"


def cache_root(cache_dir: str) -> Path:
    """`cache_dir` where given, else $XDG_CACHE_HOME/pd-serve, else ~/.cache/pd-serve (XDG base directory specification)."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification tells readers to ignore a relative path.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "pd-serve"


def prepare_once(folder: Path, build: Callable[[Path], None], progress: Progress) -> Path:
    """Return `folder`, calling `build(empty folder)` first if it does not exist yet.

    Of several processes that ask at once one builds and the others wait for it. The folder appears by a rename, so it is whole or absent;
    whatever an earlier process left behind when it was killed is removed. Raises ModelError when the cache cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another process to prepare {folder.name}"
        with _locked(folder.parent / f".{folder.name}.lock", lambda: progress(waiting, 0, 0)):
            if folder.is_dir():
                return folder
            for leftover in folder.parent.glob(f"{_UNFINISHED_PREFIX}{folder.name}-*"):
                shutil.rmtree(leftover)
            unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{_UNFINISHED_PREFIX}{folder.name}-"))
            try:
                build(unfinished)
                unfinished.chmod(0o755)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot prepare {folder}: {error.strerror or error}") from error
    return folder


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Exclusive advisory lock; waits as long as its holder lives."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
