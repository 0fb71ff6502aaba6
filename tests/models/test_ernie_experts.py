"""ERNIE 4.5 VL's two sets of experts: which tokens go where. (Adapters on them: `test_special_adapters.py`.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from transformers import AutoConfig, AutoProcessor
from transformers.models.ernie4_5_vl_moe.configuration_ernie4_5_vl_moe import Ernie4_5_VLMoeTextConfig
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeMoeBlock

from polylens.models.attention import SequenceRows
from polylens.models.families.ernie4_5_vl_moe import route_by_kind, text_arguments
from polylens.models.text import TextStep

FAMILY = "ernie4_5_vl_moe"

Ranges = Sequence[tuple[int, int]]


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


def test_experts_of_either_kind_find_their_rows() -> None:
    """In a step with both kinds of token, and in one with text alone, which the experts of text see as it is."""
    block = Ernie4_5_VLMoeMoeBlock(
        Ernie4_5_VLMoeTextConfig(hidden_size=8, moe_num_experts=4, moe_k=2, moe_intermediate_size=[8, 8])
    )
    text = nn.Module()
    text.block = block
    text.forward = lambda x, moe_mm_token_type_ids=None, polylens_batch=None: block(x, moe_mm_token_type_ids)
    seen: list[tuple[str, Ranges]] = []
    for name, experts in (("text", block.text_moe), ("vision", block.vision_moe)):
        experts.gate.register_forward_hook(lambda *_, name=name: seen.append((name, entered[-1])))
    entered: list[Ranges] = [()]

    @contextmanager
    def only_rows(ranges: Ranges) -> Iterator[None]:
        entered.append(ranges)
        yield
        entered.pop()

    route_by_kind(text)
    route_by_kind(text)  # once is enough
    batch = SimpleNamespace(only_rows=only_rows)
    x = torch.randn(1, 6, 8)
    text(x, moe_mm_token_type_ids=torch.tensor([[0, 1, 1, 0, 0, 1]]), polylens_batch=batch)
    assert seen == [("text", [(0, 1), (3, 5)]), ("vision", [(1, 3), (5, 6)])]
    seen.clear()
    text(x, moe_mm_token_type_ids=torch.zeros(1, 6).int(), polylens_batch=batch)
    text(x, moe_mm_token_type_ids=torch.tensor([[0, 1, 1, 0, 0, 1]]))
    assert seen == [("text", ()), ("text", ()), ("vision", ())]
