"""Load a base model and its processor through transformers' Auto classes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import logging as transformers_logging

from polylens.errors import ModelLoadError, first_line
from polylens.models.checkpoint_checks import check_config, check_loading_report, check_local, check_tokenizer
from polylens.models.components import model_layers
from polylens.models.families import FamilyNotes, TwoWay, notes_for
from polylens.models.parts import module_path, output_head, text_model
from polylens.models.processing import Processing
from polylens.models.text_fit import is_proven_by_tests, why_hosted
from polylens.models.text_only import TextOnlyProcessor

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from polylens.config import EngineConfig
    from polylens.core import ModelLayers

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A base model ready to run: weights on `device` in `dtype`, layers named, processor wrapped.

    host_reason: why the text model does not run in the engine's ragged batches, so that transformers' own generation
    computes its requests one by one; None for a model that is mixed. is_proven: whether that it does is known.
    """

    source: str
    model: PreTrainedModel
    config: PreTrainedConfig
    processing: Processing
    layers: ModelLayers
    notes: FamilyNotes
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    host_reason: str | None = None
    is_proven: bool = False

    @property
    def is_hosted(self) -> bool:
        return self.host_reason is not None

    def hosted(self, reason: str) -> LoadedModel:
        """This model, given over to transformers' own generation."""
        old = self.processing
        processing = Processing(old.processor, self.config, self.model.generation_config, whole=True)
        return replace(self, processing=processing, host_reason=reason)

    @property
    def text_model(self) -> nn.Module:
        return text_model(self.model)

    @property
    def two_way(self) -> TwoWay:
        """Which tokens of a prompt see later ones."""
        return self.notes.two_way if self.notes.two_way_when(self.config.get_text_config()) else TwoWay.NONE

    @property
    def two_way_ids(self) -> frozenset[int]:
        """Ids of the tokens that the block of all images is made of, if there is one."""
        if self.two_way is not TwoWay.ALL_IMAGES:
            return frozenset()
        return frozenset(self.processing.processor.image_token_ids)

    @property
    def head(self) -> nn.Module:
        return output_head(self.model)

    @property
    def vocab_size(self) -> int:
        """Width of the logits; the tokenizer may know fewer ids."""
        more = getattr(self.head, "out_additional_features", 0)  # IDEFICS: rows for the tokens it added
        return self.head.get_parameter("weight").shape[0] + more

    @property
    def head_name(self) -> str:
        return module_path(self.model, self.head)

    @property
    def inner(self) -> Any:
        """The module with `get_image_features` and `get_rope_index`: everything but the head."""
        return self.model.base_model


def load_model(source: str | Path, config: EngineConfig, chat_template: str | None = None) -> LoadedModel:
    """Load `source` (a local folder or a hub id). chat_template: its text, in place of the model's own.

    Raises ModelLoadError: missing or broken files, not a model that generates text, quantised weights, an unavailable
    device.
    """
    source = str(source)
    check_local(source)
    check_tokenizer(source)
    device = _device(config.device)
    hf_config = read_config(source, trust_remote_code=config.trust_remote_code)
    dtype = _dtype(config.dtype, hf_config)
    with quiet(not config.show_progress), loading_errors(source):
        processor = load_processor(source, hf_config, trust_remote_code=config.trust_remote_code)
        processor.chat_template = chat_template or getattr(processor, "chat_template", None)
        loaded: Any = auto_class(hf_config).from_pretrained(
            source,
            config=hf_config,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named, and refused, by `check_loading_report`
        )
    model, report = loaded
    check_loading_report(report, source)
    model = model.to(device)
    if device.type == "cpu":
        _keep_own_values(model)
    with loading_errors(source):  # a chat template with an error in it, a generation config of wrong types
        return prepare_model(model, processor, source=source, max_model_len=config.max_model_len)


def _keep_own_values(model: PreTrainedModel) -> None:
    """Copy what is mapped from the files: who saves another model over them would change this one, or end it."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def prepare_model(
    model: PreTrainedModel, processor: Any, *, source: str, max_model_len: int | None = None
) -> LoadedModel:
    """Make a model that is in memory ready to run (also used for merged models by `verify`)."""
    model.eval().requires_grad_(False)
    reason = why_hosted(model)
    if reason is not None:
        logger.warning("%s: transformers generates, one request at a time, as %s", source, reason)
    parameter = next(model.parameters())
    return LoadedModel(
        source=source,
        model=model,
        config=model.config,
        processing=Processing(processor, model.config, model.generation_config, whole=reason is not None),
        layers=model_layers(model),
        notes=notes_for(model.config.model_type),
        device=parameter.device,
        dtype=parameter.dtype,
        max_model_len=_max_model_len(model.config, max_model_len),
        host_reason=reason,
        is_proven=is_proven_by_tests(model),
    )


def read_config(source: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a model that polylens serves. Raises ModelLoadError."""
    with loading_errors(source):
        config = _answering_part(AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code))
    check_config(config, source)
    return config


def _answering_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """Of a checkpoint that holds a model for text and one that speaks it (Qwen Omni), the former's config."""
    thinker: Any = getattr(config, "thinker_config", None)
    return thinker if type(thinker) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else config


def is_text_only(config: PreTrainedConfig) -> bool:
    """Whether a config is of a language model without an encoder."""
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return not config.sub_configs  # Mistral 4 is there only
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class that loads the model of `config`."""
    is_listed_so = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForCausalLM if is_text_only(config) and not is_listed_so else AutoModelForImageTextToText


def load_processor(source: str, config: PreTrainedConfig, *, trust_remote_code: bool) -> Any:
    """The model's processor; of a language model its tokenizer in a processor's form."""
    if is_text_only(config):
        return TextOnlyProcessor(AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code))
    processor = AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
    takes_videos_only = notes_for(config.model_type).processor.num_frames is not None
    if getattr(processor, "image_processor", None) is None and not takes_videos_only:
        raise ModelLoadError(f"{source!r} is a {config.model_type!r} model, whose processor takes no pictures")
    return processor


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "meta":
            raise NotImplementedError("it holds no values")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelLoadError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return device


def _dtype(name: str, config: PreTrainedConfig) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    named = getattr(config, "dtype", None) or config.get_text_config().dtype or torch.float32
    return named if isinstance(named, torch.dtype) else _DTYPES[str(named)]


def _max_model_len(config: PreTrainedConfig, wanted: int | None) -> int:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        if limit is None:
            raise ModelLoadError("the model's config names no context length; give max_model_len")
        return limit
    if wanted < 1 or (limit is not None and wanted > limit):
        raise ModelLoadError(f"max_model_len {wanted} must be between 1 and the model's context length {limit}")
    return wanted


class loading_errors:
    """Turn what transformers, safetensors and the hub raise while loading into one clear line."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, jinja2.TemplateError):
            raise ModelLoadError(f"the chat template of {self.source!r} cannot be used: {first_line(error)}") from error
        if isinstance(error, Exception) and not isinstance(error, ModelLoadError):
            raise ModelLoadError(f"cannot load model {self.source!r}: {first_line(error)}") from error


class quiet:
    """Silence transformers' weight-loading bar where no progress was asked for."""

    def __init__(self, active: bool) -> None:
        self.active = active

    def __enter__(self) -> None:
        self.was_enabled = transformers_logging.is_progress_bar_enabled()
        if self.active:
            transformers_logging.disable_progress_bar()

    def __exit__(self, *exc: object) -> None:
        if self.active and self.was_enabled:
            transformers_logging.enable_progress_bar()
