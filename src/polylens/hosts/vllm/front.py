"""What polylens changes outside of vLLM's workers: adapters are named by their content before names are keys.

Installed by vLLM itself through the entry point `vllm.general_plugins`, in all of its processes, once; it does
nothing where the worker is not polylens'.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import shutil
import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from polylens.errors import AdapterFormatError, ModelLoadError, PolylensError
from polylens.hosts.vllm.names import MARK, content_id, digest_in_name, read_stamp, stamped

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

    from polylens.core import Digests
    from polylens.hosts.vllm.copies import Copy

WORKER = "polylens.hosts.vllm.Worker"
"""How vLLM's `worker_cls` names our worker; also under its own module's path."""

MAX_KEPT = 128
"""Copies kept of adapters that no request has just now: each takes its size on the disk and an open file."""

_INSTALLED = "_polylens_installed"

_MAKING = Lock()


def install() -> None:
    """Put adapters' digests into the names that vLLM's input processor gives to the engine. Safe to call again."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.input_processor import InputProcessor

    if getattr(InputProcessor, _INSTALLED, False):
        return
    try:
        process, identifier, schedule = _seams()
    except ModelLoadError:
        return  # our worker says so, if it is used; other people's workers run on
    InputProcessor.process_inputs = _stamping(process)
    InputProcessor._get_mm_identifier = _by_vision_digest(identifier)
    Scheduler.schedule = _with_room(schedule)
    setattr(InputProcessor, _INSTALLED, True)


def check_installed() -> None:
    """Raise ModelLoadError where the plugin did not run: names would then not tell contents apart."""
    from vllm.v1.engine.input_processor import InputProcessor

    if not getattr(InputProcessor, _INSTALLED, False):
        _seams()  # says what is wrong with vLLM, if that is why
        raise ModelLoadError(
            "polylens' plugin did not run in vLLM: install polylens with pip, and add 'polylens' to VLLM_PLUGINS if set"
        )


def _seams() -> tuple[Callable[..., Any], ...]:
    """What is replaced of vLLM. Raises ModelLoadError where that is not what this was written for."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.input_processor import InputProcessor

    from polylens.hosts.vllm.seams import check_seam, check_version

    check_version()
    return (
        check_seam(InputProcessor, "process_inputs", ("lora_request",)),
        check_seam(InputProcessor, "_get_mm_identifier", ("mm_hash", "lora_request")),
        check_seam(Scheduler, "schedule", ()),
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


def _with_room(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM 0.32 counts the adapters of the requests that a step runs, and lets others in for those that wait for the
    encoder: when these go on, there are more than `max_loras`, and it ends its engine. Here any number may run."""

    @wraps(schedule)
    def scheduled(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.lora_config
        if own is None or not _is_ours(self.vllm_config):
            return schedule(self, *args, **kwargs)
        running = {request.lora_request.lora_int_id for request in self.running if request.lora_request}
        self.lora_config = copy.copy(own)
        self.lora_config.max_loras = max(own.max_loras, len(running))
        try:
            return schedule(self, *args, **kwargs)
        finally:
            self.lora_config = own

    return scheduled


def _is_ours(config: Any) -> bool:
    named = config.parallel_config.worker_cls
    return isinstance(named, str) and named.startswith("polylens.hosts.vllm.")


def _front_of(processor: Any) -> Front:
    """One for each input processor, made when the first adapter is asked for."""
    with _MAKING:
        front: Front | None = getattr(processor, "_polylens", None)
        if front is None:
            try:
                front = processor._polylens = Front(processor.vllm_config)
            except PolylensError as error:
                raise ValueError(str(error)) from error
    return front


@dataclass(frozen=True, eq=False)
class _Known:
    """What was read at a path. state: of the folder's files then."""

    folder: Path
    state: Any
    digests: Digests
    copy: Copy


class Front:
    """Digests of adapters as they lie on disk now. An adapter that the worker could not load fails its request here:
    there, it would end the engine."""

    def __init__(self, config: VllmConfig) -> None:
        from polylens.hosts.vllm.base import read_base
        from polylens.hosts.vllm.copies import Copies
        from polylens.hosts.vllm.refused import told_refused

        self._base = read_base(config.model_config)
        self._dtype = config.model_config.dtype
        self._refused = told_refused(config)
        self._copies = Copies()
        self._copies.remove_left()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._vision: dict[str, str] = {}
        self._lock = Lock()

    def stamp(self, request: LoRARequest) -> LoRARequest:
        """The request under a name that carries its adapter's digest, with the path of a copy that stays until the
        request has ended. Raises ValueError, which fails the request."""
        from polylens.adapters.load import check_adapter_name

        name, digest = read_stamp(request.lora_name)
        if digest is not None:
            raise ValueError(f"adapter name {name!r} must not hold {MARK!r}")
        try:
            check_adapter_name(name)
            with self._lock:  # vLLM prepares prompts in several threads
                known = self._read(name, request.lora_path)
        except PolylensError as error:
            raise ValueError(str(error)) from error
        full = stamped(name, known.digests)
        self._vision[full] = known.digests.vision
        held: LoRARequest = _held_request()(full, content_id(full), str(known.copy.path))
        # vLLM drops the request's own object when the request has ended, and nothing else tells of that here.
        weakref.finalize(held, _let_go, known.copy)
        return held

    def vision_digest(self, request: LoRARequest) -> str:
        """Of tower and connector; "" if the adapter leaves them alone."""
        return self._vision[request.lora_name]

    def _read(self, name: str, path: str) -> _Known:
        """The adapter's digests and copy; read again only when a file of the folder has changed."""
        folder = self._folder(path)
        state = _state_of(folder)
        known = self._known.pop(path, None)
        if known is None or known.state != state:
            known = _Known(folder, state, *self._read_anew(name, folder))
        self._known[path] = known
        if len(self._known) > MAX_KEPT:
            self._known.popitem(last=False)
        return known

    def _folder(self, path: str) -> Path:
        """What was fetched from the hub is not asked for again by every request."""
        from polylens.adapters.read import find_adapter

        known = self._known.get(path)
        if known is not None and not Path(path).expanduser().is_dir():
            return known.folder
        return find_adapter(path)

    def _read_anew(self, name: str, folder: Path) -> tuple[Digests, Copy]:
        """Loads the copy, as the worker will, and not the folder, which may change in between."""
        from polylens.adapters import load_adapter
        from polylens.hosts.vllm.refused import check_layers

        taken = self._copies.take(folder)
        try:
            layers = replace(self._base.layers, more_tokens=False)
            adapter, _ = load_adapter(taken, layers, name=name, dtype=self._dtype, device="cpu")
            check_layers(adapter.deltas, self._refused, name)
        except PolylensError as error:
            shutil.rmtree(taken, ignore_errors=True)
            raise AdapterFormatError(str(error).replace(str(taken), str(folder))) from error
        except BaseException:
            shutil.rmtree(taken, ignore_errors=True)
            raise
        return adapter.digests, self._copies.keep(taken, digest_in_name(adapter.digests))


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
