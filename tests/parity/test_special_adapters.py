"""Adapters that train more than factors, in one batch with plain ones and the base: each equals PEFT's model alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch

from polylens import LLM, ChatRequest
from polylens.config import EngineConfig
from polylens.engine.compare import compare
from polylens.engine.merged import merge_ourselves, merge_with_peft
from polylens.engine.verify import verify
from polylens.models.loading import load_model
from tests.families.build import ALL_FAMILIES, FAMILIES, build_checkpoint
from tests.families.media import picture
from tests.families.reference import reference_answer
from tests.families.special import INNER_NORMS, MIXTURE_FAMILIES, MIXTURES, SPECIAL, kinds_of, make_special
from tests.parity.harness import BASE, Bench, Case, assert_equal, greedy, reference_completion
from tests.parity.test_bfloat16 import MAX_ERROR_RATIO, num_comparable, typical

QUESTIONS = ("picture", "two", "text")
PLAIN = "all"
"""The plain LoRA adapter that runs beside them."""
NUM_TOKENS = 5
MAX_ERROR_RATIO_OF_ONE = 2 * MAX_ERROR_RATIO
"""In bfloat16, of one adapter: a single rounding early in it weighs as much as all others (0.8 to 1.95 over seeds)."""
CI_FAMILIES = ("qwen2_vl", "gemma3")
"""Packed and tiled towers; a head of its own and one tied to scaled embeddings; Conv3d and Conv2d."""
MIXTURE = "qwen3_vl_moe"
MIXTURE_KINDS = (*MIXTURES, *INNER_NORMS, "dora")
"""Of the family with experts, those kinds that other families do not test."""
OTHER_MIXTURES = [name for name in MIXTURE_FAMILIES if name != MIXTURE and name in ALL_FAMILIES]
STRIP = "minicpmv4_6"
"""Of whose patch embedding the patches of all pictures are one input."""
KINDS = {
    MIXTURE: MIXTURE_KINDS,
    STRIP: ("convolution", "convolution dora"),
    **dict.fromkeys(OTHER_MIXTURES, tuple(MIXTURES)),
}
"""Of families whose other layers the others test."""


class SpecialBench:
    """One adapter of every kind for a family, and PEFT's own answers with each."""

    def __init__(self, bench: Bench, folder: Path, kinds: Sequence[str]) -> None:
        self.bench = bench
        self.adapters = {
            kind: make_special(bench.checkpoint, folder / kind.replace(" ", "-"), kind, seed=index)
            for index, kind in enumerate(kinds)
        }

    def cases(self) -> list[Case]:
        return [Case(question, adapter) for question in QUESTIONS for adapter in (BASE, *self.adapters, PLAIN)]

    def check_all_differ(self) -> None:
        """No kind's answer is the base model's: else equality with its reference would say nothing."""
        base = self.expected(Case("picture", BASE))
        for kind in self.adapters:
            answer = self.expected(Case("picture", kind))
            assert base.logits is not None
            assert answer.logits is not None
            assert (answer.logits[0] - base.logits[0]).abs().max() > 0.01, kind

    def check(self, llm: LLM, cases: list[Case]) -> None:
        requests = [
            ChatRequest(
                self.bench.questions[case.question],
                None if case.adapter == BASE else case.adapter,
                greedy(NUM_TOKENS),
            )
            for case in cases
        ]
        answers = llm.generate(requests)
        assert_equal(compare(answers, [self.expected(case) for case in cases]), cases)
        llm.check_integrity()

    def expected(self, case: Case):
        if case.adapter in (BASE, PLAIN):
            return self.bench.expected(case, NUM_TOKENS)
        token_ids, logits = reference_answer(
            self.bench.checkpoint, self.adapters[case.adapter], self.bench.questions[case.question], NUM_TOKENS
        )
        return reference_completion(token_ids, logits)

    def llm(self, **config) -> LLM:
        return LLM(self.bench.checkpoint, {**self.adapters, PLAIN: self.bench.adapters[PLAIN]}, **config)


@pytest.fixture(scope="module")
def special_of(bench_of: Callable[[str], Bench], tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, SpecialBench] = {}

    def special(family: str) -> SpecialBench:
        if family not in made:
            kinds = KINDS.get(family) or kinds_of(family)
            made[family] = SpecialBench(bench_of(family), tmp_path_factory.mktemp(f"special-{family}"), kinds)
        return made[family]

    return special


@pytest.mark.parametrize("mode", ["factored", "fused"])
@pytest.mark.parametrize("family", [*CI_FAMILIES, MIXTURE])
def test_mixed_batch(family: str, mode: str, special_of: Callable[[str], SpecialBench]) -> None:
    special = special_of(family)
    special.check_all_differ()
    with special.llm(apply_mode=mode) as llm:
        special.check(llm, special.cases())


@pytest.mark.full
@pytest.mark.parametrize("family", [*OTHER_MIXTURES, STRIP])
def test_layers_that_only_some_families_have(family: str, special_of: Callable[[str], SpecialBench]) -> None:
    special = special_of(family)
    special.check_all_differ()
    with special.llm(max_step_tokens=32) as llm:
        special.check(llm, special.cases())
    images = [picture(56, 56, 1), picture(84, 56, 2)]
    result = verify(special.bench.checkpoint, special.adapters, images=images, max_tokens=2)
    assert result.ok
    assert all(layer.rel_err < 1e-4 for one in result.adapters.values() for layer in one.layers if layer.rows)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["factored", "fused", "auto"])
@pytest.mark.parametrize("family", [*FAMILIES, MIXTURE])
def test_every_family_alone_and_mixed(family: str, mode: str, special_of: Callable[[str], SpecialBench]) -> None:
    special = special_of(family)
    with special.llm(apply_mode=mode) as llm:
        special.check(llm, special.cases())
        for case in special.cases():
            special.check(llm, [case])


@pytest.mark.parametrize("kind", ["head", "head saved", "embedding", "embedding saved"])
def test_a_tied_head_and_the_embedding_are_changed_apart(kind: str, special_of: Callable[[str], SpecialBench]) -> None:
    """gemma3's head is its embedding: what an adapter does to one must not reach the other."""
    special = special_of("gemma3")
    with special.llm() as llm:
        layers = llm.registry.get(kind).deltas
        changed = {name for name in layers if name in ("lm_head", "model.language_model.embed_tokens")}
        assert changed == {"lm_head" if kind.startswith("head") else "model.language_model.embed_tokens"}
        # PEFT saves copies of head and embedding beside their factors: nothing is to be done for them.
        assert llm.registry.report(kind).num_copies == (1 if kind in ("head", "embedding") else 0)


@pytest.mark.parametrize("kind", [*SPECIAL, *INNER_NORMS])
def test_both_references_of_verify_agree(kind: str, special_of: Callable[[str], SpecialBench]) -> None:
    """PEFT's merge and the project's own give the same weights, head and embedding apart where they are tied."""
    special = special_of("gemma3")
    config = EngineConfig(dtype="float32")
    states = []
    for merge in (merge_with_peft, merge_ourselves):
        loaded = load_model(special.bench.checkpoint, config)
        merge(loaded, special.adapters[kind])
        states.append(loaded.model.state_dict())
    ours, peft = states[1], states[0]
    assert ours.keys() == peft.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], peft[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", [*CI_FAMILIES, MIXTURE])
def test_verify_checks_every_kind_of_layer(family: str, special_of: Callable[[str], SpecialBench]) -> None:
    """Layer by layer: convolutions, norms, embedding and head are seen, with the right rows."""
    special = special_of(family)
    kinds = ("convolution", "norms", "connector", "embedding", "head saved")
    if family == MIXTURE:
        kinds = ("experts", "experts and router")
    images = [picture(56, 56, 1), picture(84, 56, 2)]
    result = verify(
        special.bench.checkpoint, {kind: special.adapters[kind] for kind in kinds}, images=images, max_tokens=2
    )
    assert result.ok
    for kind in kinds:
        seen = [layer for layer in result.adapters[kind].layers if layer.rows]
        assert len(seen) > len(result.adapters[kind].layers) // 2, kind
        assert all(layer.rel_err < 1e-4 for layer in seen)


@pytest.mark.parametrize("family", [pytest.param("gemma3", marks=pytest.mark.full), MIXTURE])
def test_in_bfloat16_the_error_is_like_pefts(family: str, tmp_path: Path) -> None:
    """Every kind in one mixed batch, against float32 over the same tokens: as near as PEFT's bfloat16 model alone."""
    folder = build_checkpoint(family, tmp_path / "model", dtype=torch.bfloat16)
    bench = Bench(family, folder, tmp_path / "adapters")
    kinds = KINDS.get(family) or kinds_of(family)
    adapters = {
        kind: make_special(folder, tmp_path / kind.replace(" ", "-"), kind, seed=i) for i, kind in enumerate(kinds)
    }
    cases = [Case(question, kind) for question in QUESTIONS for kind in kinds]
    requests = [ChatRequest(bench.questions[case.question], case.adapter, greedy(NUM_TOKENS)) for case in cases]
    with LLM(folder, adapters, dtype="bfloat16") as llm:
        answers = llm.generate(requests)
    ours, theirs = defaultdict(list), defaultdict(list)
    for case, answer in zip(cases, answers, strict=True):
        path, question = adapters[case.adapter], bench.questions[case.question]
        exact_ids, exact = reference_answer(folder, path, question, NUM_TOKENS)
        rounded_ids, rounded = reference_answer(folder, path, question, NUM_TOKENS, dtype=torch.bfloat16)
        n = num_comparable(exact_ids, answer.token_ids, rounded_ids)
        ours[case.adapter].append((torch.stack(answer.logits)[:n] - exact[:n]).flatten())
        theirs[case.adapter].append((rounded[:n] - exact[:n]).flatten())
    ratios = {kind: (typical(ours[kind]) / typical(theirs[kind])).item() for kind in kinds}
    whole = typical(chain.from_iterable(ours.values())) / typical(chain.from_iterable(theirs.values()))
    assert 0 < whole <= MAX_ERROR_RATIO, str(ratios)
    assert max(ratios.values()) <= MAX_ERROR_RATIO_OF_ONE, str(ratios)


def test_head_norms_know_their_tokens_before_the_first_request(bench_of: Callable[[str], Bench]) -> None:
    """Else a first step with as many tokens as heads could not be divided among adapters."""
    bench = bench_of("qwen3_vl")
    with bench.llm() as llm:
        norms = [m for name, m in llm.loaded.model.named_modules() if name.endswith(("q_norm", "k_norm"))]
        assert norms
        assert all(module.forward.__self__._axis is not None for module in norms)
