"""Which adapter folders a load over HTTP may name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from polylens.adapters.read import find_adapter
from polylens.server.error_objects import HTTPError

if TYPE_CHECKING:
    from polylens.server.options import AdapterPolicy

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def check_loading(policy: AdapterPolicy) -> None:
    """Raises HTTPError 403 where adapters are not loaded and unloaded over HTTP."""
    if not policy.loading:
        raise HTTPError(403, "adapters are not loaded over HTTP here (--enable-adapter-loading)", code="disabled")


def allowed_folder(given: str, policy: AdapterPolicy) -> Path:
    """The folder of the adapter that `given` names, fetched from the hub if it is an id and that is allowed.

    Symlinks and ".." are resolved first; the folder, and every file in it, must lie below the policy's root.
    Raises HTTPError 403, AdapterFormatError. May take long (a download).
    """
    folder = _below_root(given, policy.root) if policy.root is not None else None
    if folder is not None:
        return folder
    if policy.hub and HUB_ID.fullmatch(given) and ".." not in given:
        # A folder of that name where the server runs is not what was allowed.
        if Path(given).exists():
            raise _denied()
        return find_adapter(given)
    raise _denied()


def _below_root(given: str, root: Path) -> Path | None:
    """The real folder, if it is one below the root (which may itself be a link)."""
    try:
        root = root.resolve(strict=True)
        folder = (root / given).resolve(strict=True)
        if not folder.is_dir() or not folder.is_relative_to(root) or folder == root:
            return None
        files = [file.resolve(strict=True) for file in folder.iterdir()]
    except (OSError, ValueError, RuntimeError):  # missing, no access, a null byte, a loop of links
        return None
    return folder if all(file.is_relative_to(root) for file in files) else None


def _denied() -> HTTPError:
    # One answer for what is not there and what lies elsewhere: the server's disk is nobody's business.
    return HTTPError(403, "'lora_path' names no adapter folder that may be loaded here", param="lora_path")
