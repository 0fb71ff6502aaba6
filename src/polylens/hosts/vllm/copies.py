"""Copies of adapters as they were when their requests arrived.

A request may wait, and vLLM's worker reads its adapter when it is run; whatever happened to the folder meanwhile, it
reads the copy. One copy of a content serves all processes of a machine; it is held by a lock on a file in it, which
ends with its holder however that ends, and is removed by the last one, or by a later process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polylens.adapters.read import CONFIG_FILE
from polylens.disk_cache import CACHE_VARIABLE, default_cache_dir
from polylens.errors import AdapterFormatError

SUFFIXES = (".safetensors", ".index.json", ".bin")
"""Ends of the names of files, beside the config, that hold weights or name those that do."""

LOCK = ".held"

RETRY_S = 0.01
UNFINISHED_S = 24 * 3600.0


class Copy:
    """A held copy: the folder at `path` stays as long as this object."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._release = weakref.finalize(self, _release, path, lock)


class Copies:
    """The copies in one folder, by default in polylens' cache."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_cache_dir() / "vllm-adapters"

    def take(self, source: Path) -> Path:
        """A new, unheld copy of the adapter in `source`: for `keep`, or to be removed. Raises AdapterFormatError."""
        with self._told(source):
            self._folder.mkdir(parents=True, exist_ok=True)
            return _copied(source, Path(tempfile.mkdtemp(dir=self._folder, prefix=".new-")))

    def keep(self, taken: Path, name: str) -> Copy:
        """Hold the copy of this name, made of what `take` gave if there is none yet. Raises AdapterFormatError."""
        with self._told(taken):
            return self._keep(taken, self._folder / name)

    def _keep(self, taken: Path, place: Path) -> Copy:
        own = _hold(taken)
        if own is None:
            raise FileNotFoundError(f"{taken} is gone")
        while True:
            try:
                os.rename(taken, place)
                return Copy(place, own)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    os.close(own)
                    raise
            there = _hold(place)
            if there is not None:
                os.close(own)
                shutil.rmtree(taken, ignore_errors=True)
                return Copy(place, there)
            time.sleep(RETRY_S)  # it is being removed

    @contextmanager
    def _told(self, source: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, shutil.Error) as error:
            raise AdapterFormatError(
                f"adapter folder {str(source)!r} cannot be copied to {str(self._folder)!r} ({error}): let "
                f"${CACHE_VARIABLE} name a folder with room for the adapters in use"
            ) from error

    def remove_left(self) -> None:
        """Remove what processes left behind that were ended before they could."""
        for place in self._folder.iterdir() if self._folder.is_dir() else ():
            if place.name.startswith("."):
                _remove_unfinished(place)
            elif (lock := _hold(place)) is not None:
                _release(place, lock)


def _remove_unfinished(place: Path) -> None:
    """What nobody can have been copying or removing for so long."""
    try:
        if time.time() - place.stat().st_mtime > UNFINISHED_S:
            shutil.rmtree(place, ignore_errors=True)
    except OSError:
        pass  # it went by itself


def _copied(source: Path, target: Path) -> Path:
    for entry in os.scandir(source):
        if entry.is_file() and (entry.name == CONFIG_FILE or entry.name.endswith(SUFFIXES)):
            shutil.copyfile(entry.path, target / entry.name)
    (target / LOCK).touch()
    return target


def _hold(place: Path) -> int | None:
    """A shared lock on the copy at `place`; None if it is not there, or goes."""
    try:
        lock = os.open(place / LOCK, os.O_RDWR)
    except OSError:
        return None
    fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        if os.stat(place / LOCK).st_ino == os.fstat(lock).st_ino:
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _release(place: Path, lock: int) -> None:
    """Let go of a copy, and remove it if nobody else holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Away at once, so that a name stands for a whole copy or none.
        gone = Path(tempfile.mkdtemp(dir=place.parent, prefix=".gone-"))
        os.rename(place, gone)
        shutil.rmtree(gone, ignore_errors=True)
    except OSError:
        pass  # others hold it, or the disk does not let it go: a later process removes it
    finally:
        os.close(lock)
