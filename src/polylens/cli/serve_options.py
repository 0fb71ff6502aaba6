"""The flags of `polylens serve` and `polylens deploy`, checked, as the values that engine and server take."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polylens.cli.options import parse_adapters, read_text_file
from polylens.config import EngineConfig
from polylens.errors import RequestError
from polylens.server.options import MAX_IMAGES, MAX_VIDEOS, AdapterPolicy, MediaPolicy, ServerOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

DEMO_NAME = "polylens-demo"
"""What requests call the embedded model."""

API_KEYS_VARIABLE = "POLYLENS_API_KEYS"
ADMIN_KEYS_VARIABLE = "POLYLENS_ADMIN_API_KEYS"


def model_or_demo(given: str | None) -> str:
    if given is not None:
        return given
    from polylens.demo.data import model_path

    return str(model_path())


def adapters_named(arguments: argparse.Namespace) -> dict[str, str]:
    """Adapters that the flags name, else those that the demo model comes with. Raises as `lora_modules`."""
    if arguments.lora_modules:
        return lora_modules(arguments.lora_modules)
    if arguments.model is not None:
        return {}
    from polylens.demo.data import adapter_paths

    return {name: str(path) for name, path in adapter_paths().items() if path.is_dir()}


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's part of the flags. Raises RequestError."""
    for name in ("max_model_len", "kv_bytes", "max_num_seqs", "max_num_batched_tokens", "max_queue", "max_body_bytes"):
        check_at_least(arguments, name, 1)
    for name in ("vision_cache_bytes", "adapter_device_bytes", "adapter_host_bytes"):
        check_at_least(arguments, name, 0)
    return EngineConfig(
        # The demo's weights are stored in half precision, and meant to be run in single.
        dtype="float32" if arguments.model is None and arguments.dtype == "auto" else arguments.dtype,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
        max_model_len=arguments.max_model_len,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        kv_bytes=arguments.kv_bytes,
        vision_cache_bytes=arguments.vision_cache_bytes,
        adapter_device_bytes=arguments.adapter_device_bytes,
        adapter_host_bytes=arguments.adapter_host_bytes,
        max_running=arguments.max_num_seqs,
        max_step_tokens=arguments.max_num_batched_tokens,
        prefix_cache=not arguments.no_prefix_caching,
        adapter_processors=not arguments.no_adapter_processor,
        adapter_templates=not arguments.no_adapter_template,
        show_progress=sys.stderr.isatty(),
    )


def server_options(arguments: argparse.Namespace) -> ServerOptions:
    """The server's part of the flags. Raises RequestError."""
    check_at_least(arguments, "drain_timeout", 0)
    check_at_least(arguments, "request_timeout", 0.001)
    api_keys = _keys(arguments.api_key, arguments.api_key_file, API_KEYS_VARIABLE)
    admin_keys = _keys(arguments.admin_api_key, arguments.admin_api_key_file, ADMIN_KEYS_VARIABLE)
    if arguments.enable_adapter_loading and api_keys and not admin_keys:
        raise RequestError("--enable-adapter-loading with API keys needs an admin key too: --admin-api-key")
    return ServerOptions(
        model_names=tuple(arguments.served_model_name or [arguments.model or DEMO_NAME]),
        api_keys=api_keys,
        admin_keys=admin_keys,
        adapters=_adapter_policy(arguments),
        media=_media_policy(arguments),
        sampling=_sampling(arguments.override_generation_config),
        default_adapters=_pairs(arguments.default_adapter, "--default-adapter", ("image", "video")),
        max_body_bytes=arguments.max_body_bytes,
        deadline_s=arguments.request_timeout,
        drain_s=arguments.drain_timeout,
        cors_origins=tuple(arguments.allowed_origins or ()),
        log_prompts=arguments.enable_log_requests,
    )


def check_at_least(arguments: argparse.Namespace, name: str, low: float) -> None:
    value = getattr(arguments, name)
    if value is not None and not (low <= value < math.inf):
        raise RequestError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")


def _adapter_policy(arguments: argparse.Namespace) -> AdapterPolicy:
    root = folder_named(arguments.adapter_root, "--adapter-root")
    if arguments.enable_adapter_loading and root is None and not arguments.allow_hub:
        raise RequestError("--enable-adapter-loading needs --adapter-root DIR, or --allow-hub, or both")
    return AdapterPolicy(loading=arguments.enable_adapter_loading, root=root, hub=arguments.allow_hub)


def _media_policy(arguments: argparse.Namespace) -> MediaPolicy:
    check_at_least(arguments, "media_fetch_timeout", 0.001)
    check_at_least(arguments, "max_media_bytes", 1)
    if arguments.allowed_media_domains and not arguments.allow_remote_media:
        raise RequestError("--allowed-media-domains needs --allow-remote-media")
    limits = {"image": MAX_IMAGES, "video": MAX_VIDEOS, **_limits(arguments.limit_mm_per_prompt or ())}
    return MediaPolicy(
        local_root=folder_named(arguments.allowed_local_media_path, "--allowed-local-media-path"),
        remote=arguments.allow_remote_media,
        domains=tuple(domain.lower().strip(".") for domain in arguments.allowed_media_domains or ()),
        max_bytes=arguments.max_media_bytes,
        timeout_s=arguments.media_fetch_timeout,
        max_images=limits["image"],
        max_videos=limits["video"],
    )


def folder_named(given: str | None, flag: str) -> Path | None:
    if given is None:
        return None
    folder = Path(os.path.expanduser(given))
    if not folder.is_dir():
        raise RequestError(f"{flag}: no such folder: {given}")
    return folder.resolve()


def lora_modules(values: Sequence[str]) -> dict[str, str]:
    """Read `--lora-modules` values, `NAME=PATH` or JSON, into {name: path}. Raises RequestError, AdapterFormatError."""
    modules = (_module(value) if value.lstrip().startswith(("{", "[")) else value for value in values)
    return parse_adapters(modules, "--lora-modules")


def _module(value: str) -> str:
    module = _json(value, "--lora-modules")
    if not isinstance(module, dict) or not all(isinstance(module.get(key), str) for key in ("name", "path")):
        raise RequestError(f'--lora-modules: expected {{"name": …, "path": …}}, got {value[:200]}')
    if unknown := module.keys() - {"name", "path", "base_model_name"}:
        raise RequestError(f"--lora-modules: unknown key {sorted(unknown)[0]!r} in {value[:200]}")
    return f"{module['name']}={module['path']}"


def _limits(values: Sequence[str]) -> dict[str, int]:
    """`image=8`, `image=8,video=1` or `{"image": 8}`."""
    limits: dict[str, Any] = {}
    for value in values:
        if value.lstrip().startswith("{"):
            given = _json(value, "--limit-mm-per-prompt")
            limits.update(given)
        else:
            limits.update(_pairs(value.split(","), "--limit-mm-per-prompt", ("image", "video")))
    return {kind: _limit(kind, limit) for kind, limit in limits.items()}


def _limit(kind: str, value: Any) -> int:
    text = str(value)
    if kind not in ("image", "video") or not text.isdecimal():
        raise RequestError(f"--limit-mm-per-prompt: expected image or video and a number, got {kind}={text[:80]}")
    return int(text)


def _pairs(values: Sequence[str] | None, flag: str, keys: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for value in values or ():
        key, equals, rest = value.partition("=")
        if not equals or key not in keys or not rest:
            raise RequestError(f"{flag}: expected {' or '.join(f'{key}=…' for key in keys)}, got {value!r:.80}")
        pairs[key] = rest
    return pairs


def _json(text: str, flag: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{flag}: not JSON: {error}") from error


def _sampling(text: str | None) -> dict[str, Any]:
    """`--override-generation-config`, under the names of request fields, checked as a request's would be."""
    from polylens.core import SamplingParams

    if text is None:
        return {}
    renamed = {"max_new_tokens": "max_tokens"}
    known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
    given = _json(text, "--override-generation-config")
    if not isinstance(given, dict):
        raise RequestError("--override-generation-config must be a JSON object")
    if unknown := given.keys() - set(known):
        raise RequestError(
            f"--override-generation-config: unknown key {sorted(unknown)[0]!r}; known: {', '.join(known)}"
        )
    sampling: dict[str, Any] = {renamed.get(name) or str(name): value for name, value in given.items()}
    SamplingParams(**sampling)
    return sampling


def _keys(given: Sequence[str] | None, file: str | None, variable: str) -> tuple[str, ...]:
    """Keys from the command line, a file and the environment. Raises RequestError for an empty one."""
    lines = read_text_file(Path(file), "key file").splitlines() if file is not None else []
    from_environment = os.environ.get(variable, "").split(",")
    found = [*(given or ()), *filter(None, map(str.strip, [*lines, *from_environment]))]
    if file is not None and not any(line.strip() for line in lines):
        raise RequestError(f"key file {file} holds no key")
    if not all(key.strip() for key in found):
        raise RequestError("an API key must not be empty")
    return tuple(found)


def check_names(options: ServerOptions, adapters: dict[str, str], lazy: dict[str, Path]) -> None:
    """Every name means one thing, and default adapters exist. Raises RequestError."""
    for name in lazy.keys() & adapters.keys():
        raise RequestError(f"--lora-dir: {name!r} is given by --lora-modules too")
    for name in (adapters.keys() | lazy.keys()) & set(options.model_names):
        raise RequestError(
            f"the adapter {name!r} has the base model's name; give that another one: --served-model-name"
        )
    for kind, name in options.default_adapters.items():
        if name not in adapters and name not in lazy:
            raise RequestError(f"--default-adapter {kind}={name}: no such adapter is given")


def template_in(file: str | None) -> str | None:
    return None if file is None else read_text_file(Path(file), "chat template")
