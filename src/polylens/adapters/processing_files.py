"""Read what trainers save beside an adapter of how a conversation becomes tokens and pixels.

LLaMA-Factory, ms-swift, Unsloth and others put the whole processor there: tokenizer, chat template, pixel limits.
Files are only read here; what they mean for a model is `models.adapter_processing`'s business. Nothing in them names
code or another file that would be followed.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from polylens.adapters.combine import Combination
from polylens.adapters.read import (
    OLD_VOCABULARY_FILES,
    SETTINGS_FILES,
    TEMPLATE_FILES,
    TOKENIZER_FILES,
    find_adapter,
    read_bytes,
    read_json,
)
from polylens.core import ProcessingFiles
from polylens.errors import AdapterFormatError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from polylens.adapters.load import AdapterPath

MAX_TOKENIZER_BYTES = 64 << 20
"""Largest vocabulary file read; those of 260,000 tokens have 33 MB."""

MAX_TEMPLATE_BYTES = 1 << 20
"""Largest chat template read: the longest published ones have some 30 KB."""

NO_FILES = ProcessingFiles({}, {}, None, "")

_TEMPLATE_KEY = "chat_template"
_IGNORED_KEYS = (_TEMPLATE_KEY, "auto_map", "name_or_path", "audio_tokenizer")
"""Of tokenizer and processor configs: the template is read by itself; the others name code and other places."""


def read_processing_files(path: AdapterPath, *, settings: bool = True, templates: bool = True) -> ProcessingFiles:
    """The processing files in an adapter's folder.

    settings: whether processor settings are wanted. templates: likewise chat template and tokenizer. A combination
    has the files that all its parts have, and none where they differ. Raises AdapterFormatError.
    """
    if isinstance(path, Combination):
        parts = [read_processing_files(part, settings=settings, templates=templates) for part, _ in path.parts]
        return parts[0] if len({part.digest for part in parts}) == 1 else NO_FILES
    folder = find_adapter(path)
    objects = {name: read_json(folder / name) for name in SETTINGS_FILES if (folder / name).exists()}
    wanted = {name: _cleaned(content) for name, content in objects.items()} if settings else {}
    tokenizer = _tokenizer_files(folder) if templates else {}
    template = _template(folder, objects, tokenizer) if templates else None
    if (config := tokenizer.get("tokenizer_config.json")) is not None:
        tokenizer["tokenizer_config.json"] = json.dumps(_cleaned(json.loads(config))).encode()
        if tokenizer == {"tokenizer_config.json": b"{}"}:  # it had the template only
            tokenizer = {}
    wanted = {name: content for name, content in wanted.items() if content}
    if not (wanted or tokenizer or template):
        return NO_FILES
    return ProcessingFiles(wanted, tokenizer, template, _digest(wanted, tokenizer, template))


def _cleaned(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in _IGNORED_KEYS and not key.endswith("_file")}


def _tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Old vocabulary files only where there is no tokenizer.json, which says the same."""
    older = () if (folder / "tokenizer.json").exists() else OLD_VOCABULARY_FILES
    found = [folder / name for name in (*TOKENIZER_FILES, *older) if (folder / name).exists()]
    return {file.name: _checked(file) for file in found}


def _checked(file: Path) -> bytes:
    if file.suffix == ".json" and file.name not in ("tokenizer.json", "vocab.json"):
        return json.dumps(read_json(file)).encode()
    return read_bytes(file, MAX_TOKENIZER_BYTES)


def _template(folder: Path, objects: Mapping[str, Mapping[str, Any]], tokenizer: Mapping[str, bytes]) -> str | None:
    """The one that transformers would use: the processor's own, else the tokenizer's."""
    processor = objects.get("processor_config.json", {})
    places: list[tuple[str, Any]] = [("processor_config.json", processor.get(_TEMPLATE_KEY))]
    for name in TEMPLATE_FILES:
        file = folder / name
        if not file.exists():
            continue
        if name.endswith(".json"):
            places.append((name, read_json(file).get(_TEMPLATE_KEY)))
        else:
            places.append((name, _text(file)))
    config = json.loads(tokenizer.get("tokenizer_config.json", b"{}"))
    places.append(("tokenizer_config.json", config.get(_TEMPLATE_KEY)))
    for name, value in places:
        if value is not None:
            return _default(folder / name, value)
    return None


def _text(file: Path) -> str:
    try:
        return read_bytes(file, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise AdapterFormatError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _default(file: Path, value: Any) -> str:
    """The default one, where there are several by name (a dict, or the older list of name and template)."""
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        value = {one.get("name"): one.get("template") for one in value}
    if isinstance(value, dict):
        value = value.get("default")
    if not isinstance(value, str) or not value.strip():
        raise AdapterFormatError(f"{file}: its chat template is no text, and no list of templates with a default one")
    if len(value) > MAX_TEMPLATE_BYTES:
        raise AdapterFormatError(f"{file}: its chat template is larger than {MAX_TEMPLATE_BYTES} characters")
    return value


def _digest(settings: Mapping[str, Any], tokenizer: Mapping[str, bytes], template: str | None) -> str:
    digest = hashlib.sha256(json.dumps([settings, template], sort_keys=True).encode())
    for name, content in sorted(tokenizer.items()):
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
