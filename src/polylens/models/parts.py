"""The parts of a loaded model by what they do, as transformers names them: text model, encoders, embedding, head."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_TOWERS_ELSEWHERE = ("vqmodel", "image_encoder", "vision_tokenizer")
"""Encoders of pictures by names that transformers' `get_encoder` does not look for (Chameleon, Emu 3; GIT; Apertus)."""


def text_model(model: PreTrainedModel) -> nn.Module:
    """The decoder without its head."""
    decoder = model.get_decoder()
    return decoder.model if type(decoder).__name__.endswith("ForCausalLM") else decoder


def picture_encoder(model: PreTrainedModel) -> nn.Module:
    """The tower; the model itself where nothing of it is one."""
    encoder = model.get_encoder(modality="image")
    if encoder is model.get_encoder() and text_encoder(model) is not None:
        return encoder.get_encoder(modality="image")  # T5Gemma 2 names the encoder of both, which has a tower
    if encoder is not model and encoder is not model.base_model:
        return encoder
    if model.config.is_encoder_decoder:
        return model.get_encoder()
    named = (module for name, module in model.named_modules() if name.rpartition(".")[2] in _TOWERS_ELSEWHERE)
    return next(named, model)


def text_encoder(model: PreTrainedModel) -> nn.Module | None:
    """What encodes text in an encoder that takes pictures too: the owner of the embedding; None: there is none."""
    if not model.config.is_encoder_decoder or (encoder := model.get_encoder()) is model:
        return None
    embedding = token_embedding(model)
    owners = (module for module in encoder.modules() if any(child is embedding for child in module.children()))
    return next(owners, None)


def token_embedding(model: PreTrainedModel) -> nn.Module:
    """The embedding of the text; some models leave it to their decoder to say."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return model.get_decoder().get_input_embeddings()


def output_head(model: PreTrainedModel) -> nn.Module:
    """The layer that makes logits; some models leave it to their decoder to say."""
    return model.get_output_embeddings() or model.get_decoder().get_output_embeddings()


def module_path(model: nn.Module, wanted: nn.Module) -> str:
    """The dotted path of `wanted` inside `model`."""
    return next(name for name, module in model.named_modules() if module is wanted)


def audio_path(model: PreTrainedModel) -> str | None:
    """The path of the encoder of sounds, through which no picture goes; None where there is none."""
    encoder = model.get_encoder(modality="audio")
    # None for a tower that the config leaves out; T5Gemma 2 gives its encoder of text.
    others = (None, model, model.base_model, model.get_encoder())
    return None if any(encoder is other for other in others) else module_path(model, encoder)
