"""What polylens changes in vLLM's front process: adapters are named by their content before anything is keyed by name.

Installed by vLLM itself through the entry point `vllm.general_plugins`, in all of its processes, once; it does
nothing where the worker is not polylens'.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import weakref
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polylens.errors import AdapterFormatError, ModelLoadError, PolylensError
from polylens.hosts.vllm.names import MARK, content_id, digest_in_name, read_stamp, stamped

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.lora.request import LoRARequest

    from polylens.core import Digests
    from polylens.hosts.vllm.copies import Copy

WORKER = "polylens.hosts.vllm.Worker"
"""How vLLM's `worker_cls` names our worker; also under its own module's path."""

_INSTALLED = "_polylens_installed"


def install() -> None:
    """Put adapters' digests into the names that vLLM's input processor gives to the engine. Safe to call again."""
    from vllm.v1.engine.input_processor import InputProcessor

    from polylens.hosts.vllm.seams import check_seam, check_version

    if getattr(InputProcessor, _INSTALLED, False):
        return
    try:
        check_version()
        process = check_seam(InputProcessor, "process_inputs", ("lora_request",))
        identifier = check_seam(InputProcessor, "_get_mm_identifier", ("mm_hash", "lora_request"))
    except ModelLoadError:
        return  # our worker says so, if it is used; other people's workers run on
    InputProcessor.process_inputs = _stamping(process)
    InputProcessor._get_mm_identifier = _by_vision_digest(identifier)
    setattr(InputProcessor, _INSTALLED, True)


def check_installed() -> None:
    """Raise ModelLoadError where the plugin did not run: names would then not tell contents apart."""
    from vllm.v1.engine.input_processor import InputProcessor

    if not getattr(InputProcessor, _INSTALLED, False):
        raise ModelLoadError(
            "polylens' plugin did not run in vLLM: install polylens with pip, and add 'polylens' to VLLM_PLUGINS if set"
        )


def _stamping(process: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(process)

    @wraps(process)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(self.vllm_config):
            return process(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        request = bound.arguments.get("lora_request")
        if request is not None:
            bound.arguments["lora_request"] = _front_of(self).stamp(request)
        return process(*bound.args, **bound.kwargs)

    return process_inputs


def _by_vision_digest(identifier: Callable[..., str]) -> Callable[..., str]:
    @wraps(identifier)
    def _get_mm_identifier(self: Any, mm_hash: str, lora_request: LoRARequest | None) -> str:
        if not _is_ours(self.vllm_config):
            return identifier(self, mm_hash, lora_request)
        vision = "" if lora_request is None else _front_of(self).vision_digest(lora_request)
        return f"{vision}:{mm_hash}" if vision else mm_hash

    return _get_mm_identifier


def _is_ours(config: Any) -> bool:
    named = config.parallel_config.worker_cls
    return isinstance(named, str) and named.startswith("polylens.hosts.vllm.")


def _front_of(processor: Any) -> Front:
    """One for each input processor, made when the first adapter is asked for."""
    front = getattr(processor, "_polylens", None)
    if front is None:
        try:
            front = processor._polylens = Front(processor.vllm_config.model_config)
        except PolylensError as error:
            raise ValueError(str(error)) from error
    return front


class Front:
    """Digests of adapters as they lie on disk now. An adapter that cannot be read in full fails its request here."""

    def __init__(self, model_config: Any) -> None:
        from polylens.hosts.vllm.base import read_base
        from polylens.hosts.vllm.copies import Copies
        from polylens.hosts.vllm.refused import told_refused

        self._base = read_base(model_config)
        self._refused = told_refused(model_config)
        self._copies = Copies()
        self._copies.remove_left()
        self._known: dict[str, tuple[Any, Digests, Copy]] = {}
        self._vision: dict[str, str] = {}

    def stamp(self, request: LoRARequest) -> LoRARequest:
        """The request under a name that carries its adapter's digest, with the path of a copy that stays until the
        request has ended. Raises ValueError, which fails the request."""
        name, digest = read_stamp(request.lora_name)
        if digest is not None:
            raise ValueError(f"adapter name {name!r} must not hold {MARK!r}")
        try:
            digests, copy = self._read(name, request.lora_path)
        except PolylensError as error:
            raise ValueError(str(error)) from error
        full = stamped(name, digests)
        self._vision[full] = digests.vision
        held: LoRARequest = _held_request()(full, content_id(full), str(copy.path))
        # vLLM drops the request's own object when the request has ended, and nothing else tells of that here.
        weakref.finalize(held, _let_go, copy)
        return held

    def vision_digest(self, request: LoRARequest) -> str:
        """Of tower and connector; "" if the adapter leaves them alone."""
        return self._vision[request.lora_name]

    def _read(self, name: str, path: str) -> tuple[Digests, Copy]:
        """Digests of the adapter and its copy; read again only when a file of the folder has changed."""
        from polylens.adapters.read import find_adapter

        folder = find_adapter(path)
        state = _state_of(folder)
        known = self._known.get(path)
        if known is None or known[0] != state:
            known = self._known[path] = (state, *self._read_anew(name, folder))
        return known[1], known[2]

    def _read_anew(self, name: str, folder: Path) -> tuple[Digests, Copy]:
        """Reads the copy and not the folder, which may change in between."""
        from polylens.adapters.digest import digest_fits
        from polylens.adapters.load import read_and_fit
        from polylens.hosts.vllm.refused import check_layers

        taken = self._copies.take(folder)
        try:
            fit = read_and_fit(taken, self._base.layers)
            check_layers([part.spec.name for part in fit.layers], self._refused, name)
        except PolylensError as error:
            shutil.rmtree(taken, ignore_errors=True)
            raise AdapterFormatError(str(error).replace(str(taken), str(folder))) from error
        digests = digest_fits(fit.layers)
        return digests, self._copies.keep(taken, digest_in_name(digests))


@functools.cache
def _held_request() -> type:
    """vLLM's `LoRARequest`, of which one can be told when nobody has it any more."""
    from vllm.lora.request import LoRARequest

    class HeldRequest(LoRARequest, weakref=True):  # type: ignore[call-arg]
        pass

    return HeldRequest


def _let_go(copy: Copy) -> None:
    """Nothing is to be done: the copy was held as this call's argument."""


def _state_of(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """What changes when a file of the folder is written or replaced."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError as error:
        raise AdapterFormatError(f"adapter folder {str(folder)!r} cannot be read: {error.strerror}") from error
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
