"""ERNIE 4.5 VL's two sets of experts: which tokens go where, and that adapters on them are refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from polylens import LLM
from polylens.errors import AdapterUnsupportedError
from polylens.models.attention import SequenceRows
from polylens.models.families.ernie4_5_vl_moe import text_arguments
from polylens.models.text import TextStep

FAMILY = "ernie4_5_vl_moe"


def test_vision_tokens_of_the_prompt_go_to_the_vision_experts(checkpoint: Callable[[str], Path]) -> None:
    config = AutoConfig.from_pretrained(checkpoint(FAMILY))
    prompt = [3, config.image_start_token_id, config.image_token_id, config.image_end_token_id, 4, 5]
    prompt += [config.video_start_token_id, config.video_token_id, config.video_token_id, config.video_end_token_id]
    answer = [config.image_start_token_id, 7]
    # The last of another sequence's tokens, then a chunk from the prompt's middle to the answer's first tokens.
    rows = [
        SequenceRows(0, 1, torch.arange(4), num_prompt=2),
        SequenceRows(1, 11, torch.arange(12), num_prompt=len(prompt)),
    ]
    ids_t = torch.tensor([config.video_token_id, *(prompt + answer)[2:]])
    step = TextStep(None, config, ids_t, ids_t, torch.zeros(11, 1), None, rows)
    types = text_arguments(step)["moe_mm_token_type_ids"]
    processor = AutoProcessor.from_pretrained(checkpoint(FAMILY))
    expected = processor.create_moe_mm_token_type_ids([prompt])[0][2:]
    assert types.bool().tolist() == [[False, *map(bool, expected), False, False]]


def test_an_adapter_on_one_kinds_experts_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(checkpoint(FAMILY), dtype=torch.float32)
    experts = "model.language_model.layers.1.mlp.vision_moe.experts.down_proj"
    get_peft_model(model, LoraConfig(r=2, target_parameters=[experts])).save_pretrained(tmp_path)
    with LLM(checkpoint(FAMILY)) as llm, pytest.raises(AdapterUnsupportedError, match="tokens of one kind only"):
        llm.load_adapter("experts", tmp_path)
