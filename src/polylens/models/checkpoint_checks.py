"""Whether a checkpoint is one that polylens serves, and whole. Each check raises ModelLoadError."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import GenerationMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from polylens.errors import ModelLoadError
from polylens.models.families import notes_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""One of these holds the vocabulary of every tokenizer transformers writes or converts."""


def check_local(source: str) -> None:
    """Say early and plainly that a path is wrong: a hub look-up of it would fail obscurely."""
    path = Path(os.path.expanduser(source))  # Path's own raises where "~name" names no user
    looks_like_path = path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1
    if looks_like_path and not path.exists():
        raise ModelLoadError(f"model folder {source!r} does not exist")
    if path.is_file():
        raise ModelLoadError(f"model {source!r} is a file; give the folder that holds config.json")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"model folder {source!r} has no config.json")
        read_json_object(path / "config.json")
        if (path / "generation_config.json").exists():  # transformers passes over one that it cannot read
            read_json_object(path / "generation_config.json")


def check_tokenizer(source: str) -> None:
    """Refuse a local folder without a vocabulary: transformers would quietly make an empty tokenizer."""
    folder = Path(os.path.expanduser(source))
    if folder.is_dir() and not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        raise ModelLoadError(f"model folder {source!r} has no tokenizer: none of {', '.join(_VOCABULARY_FILES)}")


def read_json_object(file: Path) -> dict[str, Any]:
    """The content of a file of a model. Raises ModelLoadError if it cannot be read or holds something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} must hold a JSON object")
    return content


def check_config(config: PreTrainedConfig, source: str) -> None:
    known = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not known and not getattr(config, "auto_map", None):
        raise ModelLoadError(
            f"{source!r} is a {config.model_type!r} model; polylens serves vision-language models and language models "
            "(those of transformers' AutoModelForImageTextToText and AutoModelForCausalLM)"
        )
    model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if model_class is not None and not model_class.can_generate():
        raise ModelLoadError(f"{source!r} is a {config.model_type!r} model, which does not generate text")
    if (reason := notes_for(config.model_type).refused) is not None:
        raise ModelLoadError(f"{source!r} is a {config.model_type!r} model: {reason}")
    if model_class is not None and not issubclass(model_class, GenerationMixin):
        raise ModelLoadError(
            f"{source!r} is a {config.model_type!r} model, which does not generate text token by token, the only way "
            "that polylens serves"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelLoadError(
            f"{source!r} is quantised; polylens needs 16- or 32-bit weights. A QLoRA adapter can be "
            "served over the 16-bit base model, with slightly different results"
        )


def check_loading_report(report: dict[str, Any], source: str) -> None:
    """transformers fills missing weights with random values and only logs it: that is refused here."""
    missing = sorted(report.get("missing_keys", ()))
    mismatched = sorted(
        f"{name} is {tuple(found)}, the config says {tuple(wanted)}"
        for name, found, wanted in report.get("mismatched_keys", ())
    )
    if missing or mismatched:
        shown = ", ".join((missing + mismatched)[:3])
        raise ModelLoadError(
            f"the weights of {source!r} are incomplete: {len(missing)} missing and {len(mismatched)} of another "
            f"shape, e.g. {shown}"
        )
