"""The memory plan: how it divides, what it refuses, and that real work stays within what it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from polylens import LLM, ChatRequest, SamplingParams
from polylens.config import MIB, EngineConfig
from polylens.demo.data import adapter_paths, model_path
from polylens.engine.available import free_memory
from polylens.engine.peak import peak_bytes
from polylens.engine.plan import ENCODER_SHARE, MARGIN, Curve, Needs, plan_memory
from polylens.errors import ModelLoadError, RequestError

CPU = torch.device("cpu")
NEEDS = Needs(
    adapter_scratch_bytes=1_000_000,
    max_model_len=2000,
    batch=Curve(((100, 1_000_000), (200, 2_000_000), (400, 4_000_000))),
    item=Curve(((100, 1_000_000), (200, 2_000_000), (400, 4_000_000))),
    step=Curve(((512, 1_000_000), (1024, 2_000_000), (2048, 4_000_000))),
    feature_bytes=100,
    rows_per_token=4.0,
    kv_token_bytes=1000,
)


class TestPeak:
    def test_counts_what_lives_together(self) -> None:
        def work() -> None:
            a = torch.empty(MIB, dtype=torch.uint8)
            b = torch.empty(2 * MIB, dtype=torch.uint8)
            del a, b
            torch.empty(MIB, dtype=torch.uint8)

        assert peak_bytes(CPU, work) == 3 * MIB

    def test_what_was_there_before_does_not_count(self) -> None:
        before = [torch.empty(8 * MIB, dtype=torch.uint8)]
        assert peak_bytes(CPU, lambda: before.clear() or torch.empty(MIB, dtype=torch.uint8)) <= MIB


class TestCurve:
    def test_a_line_goes_on_as_a_line(self) -> None:
        assert Curve(((10, 100), (20, 200), (40, 400))).at(400) == int(MARGIN * 4000)

    def test_a_parabola_goes_on_as_a_parabola(self) -> None:
        points = tuple((x, 7 * x + 3 * x * x) for x in (10, 20, 40))
        assert Curve(points).at(400) == pytest.approx(MARGIN * (2800 + 480_000), rel=1e-9)

    def test_between_measured_sizes_the_larger_one_counts(self) -> None:
        curve = Curve(((10, 100), (20, 200)))
        assert (curve.at(1), curve.at(11), curve.at(20)) == (110, 220, 220)

    @given(st.lists(st.integers(0, 10_000), min_size=2, max_size=3), st.integers(1, 400), st.integers(0, 400))
    def test_never_falls(self, needed: list[int], size: int, more: int) -> None:
        curve = Curve(tuple(zip((10, 20, 40), sorted(needed), strict=False)))
        assert curve.at(size) <= curve.at(size + more)

    @given(st.integers(0, 10**7), st.integers(1, 5000))
    def test_largest_within_is_the_largest(self, budget: int, most: int) -> None:
        size = NEEDS.item.largest_within(budget, most)
        assert size == 0 or NEEDS.item.at(size) <= budget
        assert size == most or NEEDS.item.at(size + 1) > budget


class TestDivision:
    def plan(self, budget: int, free: int | None = None, **config: object):
        return plan_memory(
            NEEDS,
            EngineConfig(**config),
            budget_bytes=budget,
            free_bytes=budget if free is None else free,
            weight_bytes=5,
        )

    @given(st.integers(20_000_000, 10**12))
    def test_parts_stay_within_the_budget(self, budget: int) -> None:
        plan = self.plan(budget)
        assert 0 < plan.taken_bytes <= budget
        assert plan.encoder_bytes <= ENCODER_SHARE * budget
        assert plan.max_item_rows <= 8000

    def test_what_is_named_is_taken(self) -> None:
        plan = self.plan(10**9, kv_bytes=64_000, vision_cache_bytes=7, adapter_device_bytes=9)
        assert (plan.kv_bytes, plan.vision_cache_bytes, plan.adapter_bytes, plan.kv_tokens) == (64_000, 7, 9, 64)

    def test_no_more_kv_than_all_running_requests_can_fill(self) -> None:
        assert self.plan(10**12).kv_tokens == 64 * 2000

    def test_a_small_budget_limits_media_first(self) -> None:
        plan = self.plan(40_000_000)
        assert 0 < plan.max_item_rows < 8000

    def test_the_least_that_was_measured_is_counted_so_it_is_let_in(self) -> None:
        plan = self.plan(7_000_000)
        assert (plan.max_encoder_rows, plan.max_item_rows, plan.encoder_bytes) == (100, 100, int(MARGIN * 1_000_000))

    def test_a_batch_may_hold_a_large_item_beside_small_ones(self) -> None:
        """The rows of one item see each other, so they may need more than those of many items."""
        item = Curve(((100, 1_000_000), (200, 4_000_000), (400, 16_000_000)))
        plan = plan_memory(
            dataclasses.replace(NEEDS, item=item), EngineConfig(), budget_bytes=10**8, free_bytes=10**8, weight_bytes=5
        )
        assert 400 < plan.max_encoder_rows < 1000
        assert plan.encoder_bytes == item.at(max(plan.max_encoder_rows, plan.max_item_rows)) <= 0.25 * 10**8

    def test_a_step_holds_a_span_that_cannot_be_divided(self) -> None:
        needs = dataclasses.replace(NEEDS, max_model_len=8192, longest_span=8192)
        plan = plan_memory(needs, EngineConfig(), budget_bytes=10**9, free_bytes=10**9, weight_bytes=5)
        assert plan.step_bytes == int(MARGIN * 16_000_000)

    def test_states_of_requests_that_cannot_run_take_nothing_from_the_pages(self) -> None:
        plan = plan_memory(
            dataclasses.replace(NEEDS, state_bytes=1_000_000),
            EngineConfig(kv_bytes=2_100_000),
            budget_bytes=10**9,
            free_bytes=10**9,
            weight_bytes=5,
        )
        assert plan.kv_tokens == 1100

    def test_too_little_memory_names_what_is_missing_and_what_to_lower(self) -> None:
        with pytest.raises(ModelLoadError, match=r"\d+ more are needed .*lower max_model_len"):
            self.plan(1_000_000)

    def test_more_than_is_free_cannot_be_named(self) -> None:
        with pytest.raises(ModelLoadError, match="more are needed"):
            self.plan(10**9, vision_cache_bytes=2 * 10**9)
        assert self.plan(10**9, free=4 * 10**9, vision_cache_bytes=2 * 10**9).vision_cache_bytes == 2 * 10**9


def test_free_memory_is_the_containers_where_that_is_less(tmp_path: Path) -> None:
    machine = free_memory(tmp_path)
    assert machine > 0
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert free_memory(tmp_path) == 600_000
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300000\nactive_file 7\n")
    assert free_memory(tmp_path) == 900_000  # a checkpoint that was read is no memory taken
    (tmp_path / "memory.stat").write_text("inactive_file\n")
    assert free_memory(tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path) == pytest.approx(machine, rel=0.5)


def test_free_memory_in_a_container_of_control_groups_version_1(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1000000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("400000\n")
    (tmp_path / "memory" / "memory.stat").write_text("inactive_file 5\ntotal_inactive_file 100000\n")
    assert free_memory(tmp_path) == 700_000


@pytest.mark.parametrize("content", ["", "MemTotal: 5 kB\n", "no numbers\n"])
def test_a_sandbox_with_a_meminfo_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: content)
    assert free_memory(tmp_path) > MIB


@pytest.mark.parametrize("value", [0, -0.5, 1.5, "half"])
def test_wrong_utilization(value: object) -> None:
    with pytest.raises(ModelLoadError, match="gpu_memory_utilization"):
        EngineConfig(device="cuda", gpu_memory_utilization=value)


def test_utilization_without_a_gpu_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="give kv_bytes"):
        EngineConfig(gpu_memory_utilization=0.5)


# Real work on the embedded model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Small limits, so that requests reach them; no caches that outlive a step."""
    config = EngineConfig(
        dtype="float32",
        max_model_len=340,
        max_step_tokens=96,
        max_running=8,
        max_encoder_rows=1024,
        vision_cache_bytes=0,
        prefix_cache=False,
    )
    with LLM(model_path(), adapter_paths(), config=config) as made:
        yield made


def picture(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8))


def request(sizes: list[tuple[int, int]], words: int, adapter: str | None) -> ChatRequest:
    content = [{"type": "image", "image": picture(*size)} for size in sizes]
    content.append({"type": "text", "text": "read this " * words})
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    return ChatRequest([{"role": "user", "content": content}], adapter, sampling)


SIDES = st.integers(8, 400)
REQUESTS = st.lists(
    st.tuples(
        st.lists(st.tuples(SIDES, SIDES), max_size=3),
        st.integers(0, 60),
        st.sampled_from([None, "handwritten", "thermal"]),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(REQUESTS)
def test_no_request_that_is_let_in_needs_more_than_planned(
    llm: LLM, drawn: list[tuple[list[tuple[int, int]], int, str | None]]
) -> None:
    engine = llm.engine
    for sizes, words, adapter in drawn:
        try:
            engine.add_request(request(sizes, words, adapter))
        except RequestError:  # too long for the context, or a picture beyond the plan: not let in
            continue
    most = 0
    while engine.has_unfinished():
        most = max(most, peak_bytes(CPU, engine.step))
    assert most <= engine.plan.working_bytes


def test_the_largest_picture_takes_about_what_is_planned(llm: LLM) -> None:
    llm.engine.add_request(request([(470, 470)], 1, "thermal"))
    most = 0
    while llm.engine.has_unfinished():
        most = max(most, peak_bytes(CPU, llm.engine.step))
    assert 0.5 < most / llm.engine.plan.working_bytes <= 1


def test_a_picture_beyond_the_plan_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine, "plan", dataclasses.replace(llm.engine.plan, max_item_rows=16))
    with pytest.raises(RequestError, match=r"image too large: it takes \d+ rows .* room for 16"):
        llm.engine.add_request(request([(200, 200)], 1, None))
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "qwen3_vl", "paligemma"])
def test_real_work_of_other_families_stays_within_the_plan(family: str, checkpoint: Callable[[str], Path]) -> None:
    limits = {"max_model_len": 600, "max_step_tokens": 64, "max_running": 4, "max_encoder_rows": 512}
    with LLM(checkpoint(family), vision_cache_bytes=0, prefix_cache=False, **limits) as llm:
        for side in (24, 40, 60, 61, 62):
            llm.engine.add_request(request([(side, side), (40, 24)], 5, None))
        llm.engine.add_request(request([(40, 24)], 80, None))  # PaliGemma computes it in one step
        most = 0
        while llm.engine.has_unfinished():
            most = max(most, peak_bytes(CPU, llm.engine.step))
        assert 0 < most <= llm.engine.plan.working_bytes


def test_a_picture_of_an_odd_shape_is_no_larger_than_its_tokens(checkpoint: Callable[[str], Path]) -> None:
    """LLaVA-NeXT encodes whole tiles and drops the tokens of their padding."""
    with LLM(checkpoint("llava_next"), max_model_len=44) as llm:
        llm.engine.add_request(request([(16, 400)], 0, None))


def test_a_measurement_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYLENS_CACHE", str(tmp_path))
    with LLM(model_path()) as first:
        found = first.engine.plan
    monkeypatch.setattr("polylens.engine.measure.peak_bytes", None)  # would fail if called
    with LLM(model_path()) as second:
        assert second.engine.plan.encoder_bytes == found.encoder_bytes
        assert second.engine.plan.step_bytes == found.step_bytes
