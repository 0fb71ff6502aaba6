"""The context alone: which rows it gives to which adapter, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from polylens.core import Adapter, Component, Digests, LayerKind, LayerSpec, Replacement
from polylens.errors import InternalError, RowRuleError
from polylens.lora.context import RoutingContext
from polylens.lora.routing import segments
from polylens.models.row_rules import ItemSize, RowRule
from tests.lora.toys import NO_DIGESTS, make_adapter

TOWER = LayerSpec("tower.fc", Component.VISION_TOWER, LayerKind.LINEAR, 4, 4)
OTHER = LayerSpec("tower.other", Component.VISION_TOWER, LayerKind.LINEAR, 4, 4)
TEXT = LayerSpec("text.fc", Component.LANGUAGE_MODEL, LayerKind.LINEAR, 4, 4)
HEAD = LayerSpec("lm_head", Component.LANGUAGE_MODEL, LayerKind.LINEAR, 4, 4)
ONE = make_adapter("one", [TOWER, TEXT, HEAD], 1)
TWO = make_adapter("two", [TOWER, TEXT, HEAD], 2)
EMPTY = Adapter("empty", "toy", {}, NO_DIGESTS, 0)
SIZES = (ItemSize(8, 2, 3), ItemSize(4, 1, 1), ItemSize(12, 3, 2))
PROPORTIONAL = {
    RowRule.PATCHES: (8, 4, 12),
    RowRule.TILES: (2, 1, 3),
    RowRule.IMAGES: (1, 1, 1),
    RowRule.TOKENS: (3, 1, 2),
}


def rows(found: tuple) -> list[tuple[float, int, int]]:
    return [(delta, start, stop) for delta, start, stop in found]


def expected(spec: LayerSpec, counts: list[int], adapters: list[Adapter | None]) -> list:
    routed = segments(counts, adapters)
    return [
        (s.adapter.deltas[spec.name], s.start, s.stop) for s in routed if s.adapter and spec.name in s.adapter.deltas
    ]


@settings(deadline=None)
@given(
    st.sampled_from(list(PROPORTIONAL)),
    st.integers(1, 5),
    st.lists(st.sampled_from([None, ONE, TWO, EMPTY]), min_size=3, max_size=3),
)
def test_proportional_rules(rule: RowRule, times: int, adapters: list[Adapter | None]) -> None:
    ctx = RoutingContext()
    counts = [times * weight for weight in PROPORTIONAL[rule]]
    with ctx.encoder(SIZES, adapters):
        for _ in range(2):  # the second answer comes from the cache
            assert rows(ctx.delta_rows(TOWER, rule, sum(counts))) == expected(TOWER, counts, adapters)
        assert ctx.delta_rows(OTHER, rule, 10**9 + 7) == ()  # no adapter touches it: nothing to check


@pytest.mark.parametrize("rule", list(PROPORTIONAL))
@pytest.mark.parametrize("adapters", [(ONE, TWO, None), (ONE, ONE, ONE)])
def test_a_row_count_the_rule_does_not_explain_is_refused_by_name(rule: RowRule, adapters: tuple) -> None:
    ctx = RoutingContext()
    with ctx.encoder(SIZES, adapters), pytest.raises(RowRuleError, match=r"tower\.fc"):
        ctx.delta_rows(TOWER, rule, 6 * 4 + 1)


def test_per_call() -> None:
    ctx = RoutingContext()
    ctx.watch_calls(TOWER.name)
    with ctx.encoder(SIZES, (ONE, None, TWO)):
        assert rows(ctx.delta_rows(TOWER, RowRule.PER_CALL, 5)) == [(ONE.deltas[TOWER.name], 0, 5)]
        assert rows(ctx.delta_rows(TOWER, RowRule.PER_CALL, 6)) == []
        assert rows(ctx.delta_rows(TOWER, RowRule.PER_CALL, 7)) == [(TWO.deltas[TOWER.name], 0, 7)]
        with pytest.raises(RowRuleError, match=r"tower\.fc: call number 4 in a batch of 3"):
            ctx.delta_rows(TOWER, RowRule.PER_CALL, 7)


def test_views() -> None:
    ctx = RoutingContext()
    ctx.watch_calls(TOWER.name, RowRule.VIEWS)
    sizes = [ItemSize(3, 3, 9, (1, 2)), ItemSize(1, 1, 3, (1,)), ItemSize(5, 5, 15, (1, 4))]
    with ctx.encoder(sizes, (ONE, None, TWO)):
        one, two = ONE.deltas[TOWER.name], TWO.deltas[TOWER.name]
        assert rows(ctx.delta_rows(TOWER, RowRule.VIEWS, 6)) == [(one, 0, 2), (two, 4, 6)]
        assert rows(ctx.delta_rows(TOWER, RowRule.VIEWS, 6)) == [(one, 0, 2), (two, 2, 6)]
        with pytest.raises(RowRuleError, match=r"call number 3 .*'views'"):
            ctx.delta_rows(TOWER, RowRule.VIEWS, 6)
    with pytest.raises(RowRuleError, match=r"called 1 times .*'views'"), ctx.encoder(sizes, (ONE, None, TWO)):
        ctx.delta_rows(TOWER, RowRule.VIEWS, 6)


@pytest.mark.parametrize("adapters", [(ONE, None, TWO), (ONE, ONE, ONE)])
@pytest.mark.parametrize("calls", [0, 2])
def test_per_call_with_too_few_calls(adapters: tuple, calls: int) -> None:
    ctx = RoutingContext()
    ctx.watch_calls(TOWER.name)
    encoder = ctx.encoder(SIZES, adapters)
    encoder.__enter__()
    for _ in range(calls):
        ctx.delta_rows(TOWER, RowRule.PER_CALL, 5)
    with pytest.raises(RowRuleError, match=rf"tower\.fc: called {calls} times for 3"):
        encoder.__exit__(None, None, None)
    assert not ctx.active
    ctx.forget_calls(TOWER.name)
    with ctx.encoder(SIZES, adapters):
        pass


def test_per_call_layers_that_no_adapter_touches_need_no_calls() -> None:
    ctx = RoutingContext()
    ctx.watch_calls(OTHER.name)
    with ctx.encoder(SIZES, (ONE, None, TWO)):
        pass


def test_an_error_inside_is_not_hidden_by_the_call_count() -> None:
    ctx = RoutingContext()
    ctx.watch_calls(TOWER.name)
    with pytest.raises(KeyError, match="inner"), ctx.encoder(SIZES, (ONE, None, TWO)):
        raise KeyError("inner")
    assert not ctx.active


def test_no_effect_layers_get_no_delta_and_no_check() -> None:
    ctx = RoutingContext()
    with ctx.encoder(SIZES, (ONE, TWO, None)):
        assert ctx.delta_rows(TOWER, RowRule.NO_EFFECT, 17) == ()


def test_unproven_layers_take_one_adapter_only() -> None:
    ctx = RoutingContext()
    with ctx.encoder(SIZES, (ONE, ONE, ONE)):
        assert rows(ctx.delta_rows(TOWER, RowRule.UNPROVEN, 17)) == [(ONE.deltas[TOWER.name], 0, 17)]
    for adapters in ((ONE, ONE, TWO), (ONE, None, ONE)):
        with ctx.encoder(SIZES, adapters):
            with pytest.raises(RowRuleError, match=r"tower\.fc.*one adapter at a time"):
                ctx.delta_rows(TOWER, RowRule.UNPROVEN, 17)
            assert ctx.delta_rows(OTHER, RowRule.UNPROVEN, 17) == ()


def test_text_rows_and_head_rows() -> None:
    ctx = RoutingContext(head_layer="lm_head")
    tokens = segments([3, 1, 2], [ONE, None, TWO])
    head = segments([1, 1, 1], [ONE, None, TWO])
    with ctx.text(tokens, head):
        assert rows(ctx.delta_rows(TEXT, RowRule.UNPROVEN, 6)) == expected(TEXT, [3, 1, 2], [ONE, None, TWO])
        assert rows(ctx.delta_rows(HEAD, RowRule.UNPROVEN, 3)) == expected(HEAD, [1, 1, 1], [ONE, None, TWO])
        assert ctx.has_delta("lm_head")
        assert not ctx.has_delta("tower.other")
        with pytest.raises(RowRuleError, match=r"text\.fc: called with 3 rows in a text step that gives it 6"):
            ctx.delta_rows(TEXT, RowRule.UNPROVEN, 3)
        with pytest.raises(RowRuleError, match="lm_head: called with 6 rows"):
            ctx.delta_rows(HEAD, RowRule.UNPROVEN, 6)
    with ctx.text(tokens):
        assert len(ctx.delta_rows(HEAD, RowRule.UNPROVEN, 6)) == 2


def test_layers_of_the_other_stage_are_refused() -> None:
    ctx = RoutingContext()
    with ctx.text(segments([6], [ONE])), pytest.raises(RowRuleError, match=r"tower\.fc.*text step"):
        ctx.delta_rows(TOWER, RowRule.PATCHES, 6)
    with ctx.encoder(SIZES, (ONE, ONE, ONE)), pytest.raises(RowRuleError, match=r"text\.fc.*encoder step"):
        ctx.delta_rows(TEXT, RowRule.UNPROVEN, 24)


def test_without_adapters_nothing_is_active() -> None:
    ctx = RoutingContext()
    with ctx.text(segments([6], [None])):
        assert not ctx.active
        assert ctx.delta_rows(TEXT, RowRule.UNPROVEN, 1) == ()
    with ctx.encoder(SIZES, (None, None, None)):
        assert not ctx.active
    assert ctx.delta_rows(TEXT, RowRule.UNPROVEN, 1) == ()


def test_misuse_is_refused() -> None:
    ctx = RoutingContext()
    inner = ctx.encoder(SIZES, (None, None, None))
    with ctx.text(segments([6], [None])), pytest.raises(InternalError, match="inside another"):
        inner.__enter__()
    with pytest.raises(InternalError, match="3 item sizes for 1"), ctx.encoder(SIZES, (ONE,)):
        pass


def test_a_part_of_a_text_steps_rows_is_routed_by_itself_and_the_head_is_not_touched() -> None:
    ctx = RoutingContext(head_layer="lm_head")
    one, two = ONE.deltas["text.fc"], TWO.deltas["text.fc"]
    with ctx.text(segments([3, 2, 4], [ONE, None, TWO]), segments([1, 1, 1], [ONE, None, TWO])):
        with ctx.only_rows([(2, 4), (6, 9)]):
            assert rows(ctx.delta_rows(TEXT, RowRule.TOKENS, 5)) == [(one, 0, 1), (two, 2, 5)]
            assert rows(ctx.delta_rows(HEAD, RowRule.TOKENS, 3)) == [
                (ONE.deltas["lm_head"], 0, 1),
                (TWO.deltas["lm_head"], 2, 3),
            ]
            with pytest.raises(RowRuleError, match="called with 9 rows in a text step that gives it 5"):
                ctx.delta_rows(TEXT, RowRule.TOKENS, 9)
            with ctx.only_rows([(1, 3)]):
                assert rows(ctx.delta_rows(TEXT, RowRule.TOKENS, 2)) == [(two, 1, 2)]
        assert rows(ctx.delta_rows(TEXT, RowRule.TOKENS, 9)) == [(one, 0, 3), (two, 5, 9)]


def test_the_tokens_of_a_part_are_counted_without_adapters_too() -> None:
    """Norms of heads learn from any forward which of their rows are tokens: by a wrong count they would learn wrong."""
    ctx = RoutingContext()
    with ctx.text(segments([5], [None])):
        with ctx.only_rows([(0, 1), (2, 4)]):
            assert ctx.num_tokens == 3
        assert ctx.num_tokens == 5
    with ctx.only_rows([(0, 4)]):
        assert ctx.num_tokens == 0


def test_a_part_of_the_rows_exists_in_text_steps_only() -> None:
    ctx = RoutingContext()
    with ctx.only_rows([(0, 4)]):  # no adapter anywhere: nothing to route
        assert not ctx.active
    outside = pytest.raises(InternalError, match="outside of a text step")
    with ctx.encoder(SIZES, [ONE, None, TWO]), outside, ctx.only_rows([(0, 1)]):
        pass


def shared_adapter(name: str, positions: torch.Tensor) -> Adapter:
    deltas = {"embeddings.positions": Replacement("embeddings.positions", positions)}
    return Adapter(name, "toy", deltas, Digests(*[name] * 5), 0, special=True, undivided=True)


def test_what_all_items_share_is_exchanged_for_one_adapter() -> None:
    """For the whole forward, so whoever reads the parameter sees it; a batch with others in it is refused."""
    module = nn.Module()
    module.positions = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    ctx = RoutingContext()
    ctx.share("embeddings.positions", module, "positions")
    new, other = shared_adapter("new", torch.ones(2, 3)), shared_adapter("other", torch.ones(2, 3))
    own = module.positions
    for adapters in ((new, new, new), (new, dataclasses.replace(new), new)):  # two names of one content
        with ctx.encoder(SIZES, adapters):
            assert torch.equal(module.positions, torch.ones(2, 3))
        assert module.positions is own
    with ctx.whole(new):
        assert torch.equal(module.positions, torch.ones(2, 3))
    for adapters in ((new, None, new), (new, other, new), (new, ONE, new)):
        with pytest.raises(RowRuleError, match="all items share"), ctx.encoder(SIZES, adapters):
            pass
    with ctx.encoder(SIZES, (ONE, None, ONE)):
        assert module.positions is own
