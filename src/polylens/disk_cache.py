"""Results of measurements on disk, so that a model or machine is measured once and not at every start.

The key is a hash of what a result depends on. A file that is damaged counts as absent: it is measured again and the
file written anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "POLYLENS_CACHE"

T = TypeVar("T")


def default_cache_dir() -> Path:
    """The folder $POLYLENS_CACHE names, else ~/.cache/polylens; for a user without a home (as in some containers), one
    that lasts as long as this process."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(os.path.expanduser(named))  # Path's own raises where "~name" names no user
    try:
        return Path.home() / ".cache" / "polylens"
    except RuntimeError:
        return Path(_own_folder().name)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Nobody else can have put anything there, as compiled code."""
    return tempfile.TemporaryDirectory(prefix="polylens-cache-")


class DiskCache:
    """JSON values of one kind, one file each, in a folder of `cache_dir` named `kind`.

    version: raise it whenever the measurement may find another result for the same facts.
    """

    def __init__(self, kind: str, version: int, cache_dir: Path | None = None) -> None:
        self._kind = kind
        self._version = version
        self._folder = (cache_dir or default_cache_dir()) / kind

    def path(self, facts: Mapping[str, Any]) -> Path:
        """The file of the result that depends on `facts` (JSON values): its name is a hash of them."""
        text = json.dumps({**facts, "version": self._version}, sort_keys=True, default=str)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def load(self, facts: Mapping[str, Any], read: Callable[[Any], T]) -> T | None:
        """The stored result, as `read` makes it of the JSON; None if there is none, or none that can be read."""
        path = self.path(facts)
        try:
            return read(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("ignoring the damaged %s result %s (%s)", self._kind, path, error)
            return None

    def store(self, facts: Mapping[str, Any], result: Any) -> None:
        """Write a JSON value whole or not at all. A folder that cannot be written costs time, not correctness."""
        path = self.path(facts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(path, json.dumps(result, indent=1))
        except OSError as error:
            logger.warning(
                "cannot keep the %s result in %s (%s): the next start measures again", self._kind, path.parent, error
            )


def _write_atomically(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
