"""bfloat16: as near to the float32 merged model as the bfloat16 merged model is.

The checkpoint itself is bfloat16, as published ones are, so that the base weights are the same numbers in all
three runs. Both runs are compared with float32 over the same tokens: up to the first at which one of them differs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.families.build import FAMILIES, build_checkpoint
from tests.families.reference import merged_reference
from tests.parity.harness import ADAPTERS, NUM_TOKENS, Bench, mixed

MAX_ERROR_RATIO = 1.5
"""Dynamic application rounds at other places than merging; it must not be noticeably worse."""


@pytest.mark.parametrize("family", FAMILIES)
def test_error_is_like_a_merged_models(family: str, tmp_path: Path) -> None:
    folder = build_checkpoint(family, tmp_path / "model", dtype=torch.bfloat16)
    bench = Bench(family, folder, tmp_path / "adapters")
    cases = mixed(["picture", "two", "video", "text"], ADAPTERS)
    with bench.llm(dtype="bfloat16") as llm:
        answers = llm.generate([bench.request(case) for case in cases])
    ours, theirs = defaultdict(list), defaultdict(list)
    for case, answer in zip(cases, answers, strict=True):
        exact = bench.expected(case)
        merged_ids, merged_logits = merged_reference(
            folder,
            bench.adapters.get(case.adapter),
            bench.questions[case.question],
            NUM_TOKENS,
            ignore_eos=True,
            dtype=torch.bfloat16,
            frames_as_pictures=bench.frames_as_pictures,
        )
        n = num_comparable(exact.token_ids, answer.token_ids, merged_ids)
        truth = torch.stack(exact.logits)[:n]
        ours[case.adapter].append((torch.stack(answer.logits)[:n] - truth).flatten())
        theirs[case.adapter].append((merged_logits[:n] - truth).flatten())
    ratios = {adapter: (_rms(ours[adapter]) / _rms(theirs[adapter])).item() for adapter in ADAPTERS}
    assert all(0 < ratio <= MAX_ERROR_RATIO for ratio in ratios.values()), ratios


def num_comparable(*answers: Sequence[int]) -> int:
    """Steps whose logits follow from the same tokens in all answers."""
    for index, tokens in enumerate(zip(*answers, strict=True)):
        if len(set(tokens)) > 1:
            return index + 1
    return len(answers[0])


def _rms(errors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(errors)).square().mean().sqrt()
