"""What is done to the head's output is what the model's own class does: scaled, capped, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GraniteConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from polylens.models.after_head import after_head
from tests.families.anyres import granite4_vision, granite_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def _granite(**more: Any) -> GraniteConfig:
    return GraniteConfig(**SMALL, logits_scaling=8.0, **more)


def _granite4_vision(logits_scaling: float) -> Any:
    model = granite4_vision(granite_tokenizer())
    model.config.text_config.logits_scaling = logits_scaling
    return model


def _vision(config_class: Any, model_class: Any, text: dict[str, Any]) -> Any:
    tower = {"model_type": "siglip_vision_model", **TOWER, "image_size": 28, "patch_size": 7}
    return model_class(config_class(text_config=text, vision_config=tower))


MODELS = {
    "divided": lambda: AutoModelForCausalLM.from_config(_granite()),
    "multiplied": lambda: AutoModelForCausalLM.from_config(Cohere2Config(**SMALL, logit_scale=0.0625)),
    "capped": lambda: AutoModelForCausalLM.from_config(Gemma2Config(**SMALL, final_logit_softcapping=0.5)),
    "divided by the whole model": lambda: _granite4_vision(logits_scaling=8.0),
    "not divided by the whole model": lambda: _vision(
        LlavaConfig, LlavaForConditionalGeneration, {**_granite().to_dict(), "model_type": "granite"}
    ),
    "not capped by the whole model": lambda: _vision(
        LlavaConfig,
        LlavaForConditionalGeneration,
        {**SMALL, "model_type": "gemma2", "final_logit_softcapping": 0.5},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_whole_forward(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.inference_mode():
        output = model(input_ids=torch.arange(1, 6)[None], output_hidden_states=True)
        given = model.get_output_embeddings()(output.hidden_states[-1])
        logits = after_head(model)(given)
        assert torch.allclose(logits, output.logits, rtol=1e-6, atol=1e-6)
        assert torch.allclose(given, output.logits) == name.startswith("not ")


def test_the_model_is_left_as_it_was() -> None:
    model = AutoModelForCausalLM.from_config(_granite()).eval()
    below = model.model
    after_head(model)
    assert model.model is below
