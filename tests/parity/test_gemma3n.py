"""Gemma 3n: tokens that bound pictures and sounds go through the connector, in text as well."""

from __future__ import annotations

from collections.abc import Callable

import torch

from polylens import TextRequest
from polylens.engine.compare import compare
from tests.families.reference import merged_model
from tests.parity.harness import Bench, greedy, reference_completion

NUM_TOKENS = 3


def test_bounding_tokens_in_text_are_embedded_as_merged_models_do(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("gemma3n")
    with bench.llm("connector", "tower", "all", page_tokens=4) as llm:
        first = llm.loaded.config.eoi_token_id
        sound = llm.loaded.config.eoa_token_id
        prompt = [2, 300, 301, first, 302, first + 1, sound, 303, sound + 1, 304]
        adapters = [None, "connector", "all", None, "tower"]
        answers = [llm.generate([TextRequest(prompt, adapter, greedy(NUM_TOKENS))])[0] for adapter in adapters]
        llm.check_integrity()
    expected = []
    for adapter in adapters:
        model = merged_model(bench.checkpoint, bench.adapters[adapter] if adapter else None, torch.float32)
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.stack([step[0].float() for step in out.logits])
        expected.append(reference_completion(out.sequences[0, -NUM_TOKENS:].tolist(), logits))
    assert compare(answers, expected).ok
    assert (expected[1].logits[0] - expected[0].logits[0]).abs().max() > 1e-2
