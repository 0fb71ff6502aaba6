"""Read a PEFT adapter folder: its config and its tensors, from a local path or the hub.

Adapter files come from strangers. Whatever is wrong with one ends as one AdapterFormatError; nothing in
it is executed (`.bin` goes through torch's weights-only load).
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from polylens.adapters.options import LoraOptions, check_refusals, parse_options
from polylens.adapters.patterns import MAX_NAME_CHARS
from polylens.errors import AdapterFormatError, AdapterUnsupportedError, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_FILE = "adapter_config.json"
SAFETENSORS_FILE = "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"
BIN_FILE = "adapter_model.bin"

FOREIGN_WEIGHT_FILES = (
    "non_lora_trainables.bin",  # LLaVA's own trainer: the projector, trained in full
    "non_lora_state_dict.bin",  # Qwen2-VL-Finetune: tower or merger, trained in full
    "vit.safetensors",  # ms-swift: the tower, trained in full beside a LoRA of the text model
)
"""Weights that trainers put beside the adapter: without them the adapter is not what was trained."""

SETTINGS_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Settings of the processor and its image and video parts; the first may hold a chat template too."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
OLD_VOCABULARY_FILES = ("vocab.json", "merges.txt", "tokenizer.model")
"""Vocabularies of tokenizers that were saved without their fast form."""

TEMPLATE_FILES = ("chat_template.json", "chat_template.jinja")
"""In the order in which transformers prefers them."""

PROCESSING_FILES = (*SETTINGS_FILES, *TOKENIZER_FILES, *OLD_VOCABULARY_FILES, *TEMPLATE_FILES)
"""What trainers save beside the adapter of how a conversation becomes tokens and pixels."""

MAX_CONFIG_BYTES = 4 << 20
"""Largest adapter_config.json read: a config that lists every layer of a big model has some 100 KB."""

MAX_TENSOR_NAME_CHARS = MAX_NAME_CHARS + 60
"""Longest tensor name taken: a module path, PEFT's prefix and the factor's suffix."""

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_SHARD_NAME = re.compile(r"[\w][\w.-]*\.safetensors")
"""A shard is a file of the adapter's own folder: no separators, no dots in front."""

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True, eq=False)
class AdapterFiles:
    """The content of an adapter folder. tensors: name in the file -> CPU tensor, not yet checked against a model."""

    source: str
    options: LoraOptions
    tensors: Mapping[str, torch.Tensor]


def read_adapter(path: str | Path) -> AdapterFiles:
    """Read an adapter from a folder, or from the hub if `path` is no folder but an id.

    Raises AdapterFormatError (files missing or malformed), AdapterUnsupportedError (an option, or a weight
    file beside the adapter, that polylens does not apply).
    """
    folder = find_adapter(path)
    config = read_config(folder)
    check_refusals(config)
    options = parse_options(config)
    if foreign := foreign_weights(folder):
        raise AdapterUnsupportedError(
            f"{folder / foreign[0]} holds weights trained beside the adapter, which polylens does not apply",
            option=foreign[0],
        )
    return AdapterFiles(source=str(path), options=options, tensors=read_tensors(folder))


def find_adapter(path: str | Path) -> Path:
    """The local folder of an adapter, fetched from the hub if `path` is an id. Raises AdapterFormatError.

    A folder without an adapter of its own that holds exactly one (`checkpoint-500/`, or PEFT's sub-folder of an
    adapter's name) stands for that one.
    """
    try:
        folder = Path(path).expanduser()
        if str(path) and folder.is_dir():
            return _only_inner(folder)
        exists = bool(str(path)) and folder.exists()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: "~name" of no user
        reason = getattr(error, "strerror", None) or first_line(error)
        raise AdapterFormatError(f"adapter path {str(path)[:200]!r} cannot be opened: {reason}") from error
    if exists:
        raise AdapterFormatError(f"adapter {str(path)!r} is a file; give the folder that holds {CONFIG_FILE}")
    if not _HUB_ID.fullmatch(str(path)):
        raise AdapterFormatError(f"adapter {str(path)[:200]!r} is neither a folder nor a hub id")
    return _fetch(str(path))


def _only_inner(folder: Path) -> Path:
    if (folder / CONFIG_FILE).exists():
        return folder
    inner = _inner_adapters(folder)
    return inner[0] if len(inner) == 1 else folder


def _inner_adapters(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob(f"*/{CONFIG_FILE}"))


def _fetch(hub_id: str) -> Path:
    weights = [SAFETENSORS_FILE, INDEX_FILE, "adapter_model-*.safetensors", BIN_FILE, *FOREIGN_WEIGHT_FILES]
    wanted = [CONFIG_FILE, *weights, *PROCESSING_FILES]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = first_line(error)
        raise AdapterFormatError(
            f"adapter {hub_id!r} is no folder here and cannot be fetched from the hub: {reason}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The object in adapter_config.json. Raises AdapterFormatError."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise AdapterFormatError(f"{str(folder)!r} has no {CONFIG_FILE}{_where_instead(folder)}")
    return read_json(file)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of at most MAX_CONFIG_BYTES, no key twice. Raises AdapterFormatError."""
    try:
        content = json.loads(read_bytes(file, MAX_CONFIG_BYTES).decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(f"{file} is not valid JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise AdapterFormatError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content


def read_bytes(file: Path, limit: int) -> bytes:
    """A file's content, of at most `limit` bytes. Raises AdapterFormatError."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(limit + 1)
    except OSError as error:
        raise AdapterFormatError(f"{file} cannot be read: {error.strerror}") from error
    if len(raw) > limit:
        raise AdapterFormatError(f"{file} is larger than {limit} bytes")
    return raw


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:60]!r} occurs twice")
    return content


def _where_instead(folder: Path) -> str:
    """PEFT saves adapters not named "default" in sub-folders, trainers their checkpoints: point there."""
    inner = [path.name for path in _inner_adapters(folder)]
    if inner:
        return f"; its sub-folders {', '.join(map(repr, inner[:4]))} have one: give one of these"
    if (folder / "config.json").is_file():
        return "; it seems to be a full model, not an adapter"
    return ""


def foreign_weights(folder: Path) -> tuple[str, ...]:
    """Names of weight files beside the adapter that belong to what was trained."""
    return tuple(name for name in FOREIGN_WEIGHT_FILES if (folder / name).exists())


def refuse_pickle(folder: Path) -> None:
    """Raise AdapterUnsupportedError for an adapter whose weights are a pickle, for who reads none (the server)."""
    if (folder / BIN_FILE).exists() and not any((folder / name).exists() for name in (SAFETENSORS_FILE, INDEX_FILE)):
        raise AdapterUnsupportedError(
            f"the adapter's weights are in {BIN_FILE}, a pickle, which is not read here; save it as {SAFETENSORS_FILE}",
            option=BIN_FILE,
        )


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the adapter, on the CPU, as stored. Raises AdapterFormatError."""
    if (folder / SAFETENSORS_FILE).exists():
        file = folder / SAFETENSORS_FILE
        tensors = _read_safetensors(file)
    elif (folder / INDEX_FILE).exists():
        file = folder / INDEX_FILE
        tensors = _read_shards(folder, file)
    elif (folder / BIN_FILE).exists():
        file = folder / BIN_FILE
        tensors = _read_bin(file)
    else:
        raise AdapterFormatError(f"{str(folder)!r} has neither {SAFETENSORS_FILE} nor {INDEX_FILE} nor {BIN_FILE}")
    if not tensors:
        raise AdapterFormatError(f"{file} holds no tensors")
    for name, tensor in tensors.items():
        _check_tensor(file, name, tensor)
    return tensors


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as content:
            # Cloned: the tensors must outlive any change of the mapped file.
            return {name: content.get_tensor(name).clone() for name in content.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise AdapterFormatError(f"{file} is not a readable safetensors file: {first_line(error)}") from error


def _read_shards(folder: Path, index: Path) -> dict[str, torch.Tensor]:
    """The tensors of all shards that the index names; index and shards must agree on every one."""
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise AdapterFormatError(f"{index} has no weight_map from tensor names to files")
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(shard_of.values())):
        if not _SHARD_NAME.fullmatch(shard):
            raise AdapterFormatError(f"{index} names {shard[:80]!r}, which is no safetensors file of the same folder")
        if not (folder / shard).is_file():
            raise AdapterFormatError(f"{index} names {shard!r}, which is missing")
        content = _read_safetensors(folder / shard)
        listed = {name for name, owner in shard_of.items() if owner == shard}
        if differing := sorted(listed ^ content.keys()):
            raise AdapterFormatError(f"{index} and {shard} disagree on {len(differing)} tensors, e.g. {differing[0]!r}")
        tensors |= content
    return tensors


def _read_bin(file: Path) -> dict[str, torch.Tensor]:
    try:
        _refuse_compressed(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle makes torch's reader fail in any way there is
        raise AdapterFormatError(f"{file} is not a readable torch weights file: {first_line(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise AdapterFormatError(f"{file} must hold a dictionary of named tensors")
    return {name: _plain_tensor(file, name, value) for name, value in content.items()}


def _refuse_compressed(file: Path) -> None:
    """torch stores without compression; a compressed archive is a way to claim far more memory than disk."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed, which torch never writes")


def _plain_tensor(file: Path, name: str, value: Any) -> torch.Tensor:
    """A dense CPU tensor that owns all its values (a stride of 0 may claim any size)."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        raise AdapterFormatError(f"{file}: {name[:200]!r} is not a dense tensor")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise AdapterFormatError(f"{file}: {name[:200]!r} claims more values than the file holds")
    return value.detach().contiguous()


def _check_tensor(file: Path, name: str, tensor: torch.Tensor) -> None:
    if len(name) > MAX_TENSOR_NAME_CHARS or not name.isprintable():
        raise AdapterFormatError(f"{file}: the tensor name {name[:80]!r}… is not a module path")
    if tensor.dtype not in FLOAT_DTYPES:
        raise AdapterFormatError(f"{file}: {name!r} is {tensor.dtype}; adapters are float32, float16 or bfloat16")
