"""The compiled kernels against torch, and what happens where they cannot be compiled."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from polylens.lora.kernels.cpu import FEW_ROWS, FewRowsKernel
from polylens.lora.ops import apply_reference
from polylens.lora.routing import DeltaRows
from polylens.native import Kernels, compiled_kernels, library
from tests.lora.toys import make_delta


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = compiled_kernels()
    if found is None:
        pytest.skip("no C compiler here")
    return found


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 17), num_in=st.integers(1, 70), num_out=st.integers(1, 40), biased=st.booleans())
def test_a_linear_layer_equals_torchs(kernels: Kernels, rows: int, num_in: int, num_out: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, num_in, generator=generator), torch.randn(num_out, num_in, generator=generator)
    bias = torch.randn(num_out, generator=generator) if biased else None
    y = kernels.linear(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_linear_layer_of_what_is_not_finite(kernels: Kernels) -> None:
    x, weight = torch.ones(3, 20), torch.ones(7, 20)
    x[1, 3], weight[4, 19] = float("nan"), float("inf")
    y = kernels.linear(x, weight, None)
    assert y[1].isnan().all()
    assert (y[[0, 2], 4] == float("inf")).all()
    assert (y[[0, 2]][:, [0, 1, 2, 3, 5, 6]] == 20).all()


@settings(deadline=None, max_examples=60)
@given(
    spans=st.lists(st.tuples(st.integers(1, 9), st.integers(0, FEW_ROWS + 3), st.integers(0, 2)), max_size=5),
    num_in=st.integers(1, 70),
    num_out=st.integers(1, 70),
)
def test_adapters_equal_the_definition(
    kernels: Kernels, spans: list[tuple[int, int, int]], num_in: int, num_out: int
) -> None:
    rows, row = [], 0
    for seed, (rank, count, gap) in enumerate(spans):
        start = row + gap
        row = start + count
        rows.append(DeltaRows(make_delta("layer", num_in, num_out, rank, seed, torch.float32), start, row))
    generator = torch.Generator().manual_seed(row)
    x, y = torch.randn(row + 1, num_in, generator=generator), torch.randn(row + 1, num_out, generator=generator)
    double = [
        DeltaRows(make_delta("layer", num_in, num_out, r.delta.rank, i), r.start, r.stop) for i, r in enumerate(rows)
    ]
    expected = apply_reference(x.double(), y.double(), double)
    base = torch.ones(row + 1, dtype=torch.bool)
    for one in rows:
        base[one.start : one.stop] = False
    ours = y.clone()
    FewRowsKernel(kernels).apply_factored_(x, ours, rows)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(ours[base], y[base])


def test_adapters_of_other_layouts(kernels: Kernels) -> None:
    """Factors that are not contiguous, and outputs with gaps, take no wrong turn."""
    delta = make_delta("layer", 20, 30, 4, 1, torch.float32)
    odd = type(delta)("layer", delta.a.t().contiguous().t(), delta.b.t().contiguous().t(), delta.scaling)
    x, wide = torch.randn(3, 20), torch.zeros(3, 50)
    for y in (torch.zeros(3, 30), wide[:, :30]):
        expected = apply_reference(x, y, [DeltaRows(delta, 0, 2)])
        FewRowsKernel(kernels).apply_factored_(x, y, [DeltaRows(odd, 0, 2)])
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)
    assert not wide[:, 30:].any()


def test_the_kernel_keeps_no_adapter_alive_and_mistakes_none_for_another(kernels: Kernels) -> None:
    kernel = FewRowsKernel(kernels)
    x = torch.randn(2, 20)
    for seed in range(50):  # the same addresses and ids come again
        delta = make_delta("layer", 20, 30, 1 + seed % 5, seed, torch.float32)
        y = torch.zeros(2, 30)
        kernel.apply_factored_(x, y, [DeltaRows(delta, 0, 2)])
        torch.testing.assert_close(y, apply_reference(x, torch.zeros(2, 30), [DeltaRows(delta, 0, 2)]))
        del delta
    gc.collect()
    assert not kernel._heads._by_id


@settings(deadline=None, max_examples=60)
@given(
    contexts=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 4),
    widths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    strength=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_decode_attention_equals_torchs(
    kernels: Kernels, contexts: list[int], groups: int, per_group: int, widths: tuple[int, int], strength: float
) -> None:
    generator = torch.Generator().manual_seed(sum(contexts))
    num_slots, heads = 256, groups * per_group
    keys = torch.randn(num_slots, groups, widths[0], generator=generator)
    values = torch.randn(num_slots, groups, widths[1], generator=generator)
    # As transformers gives it: heads before tokens.
    q = strength * torch.randn(heads, len(contexts) + 1, widths[0], generator=generator).transpose(0, 1)
    slots = [torch.randperm(num_slots, generator=generator)[:context] for context in contexts]
    out = torch.full((len(contexts) + 1, heads, widths[1]), 7.0)
    kernels.decode_attention_(out, q, keys, values, list(enumerate(slots)), 0.3)
    for row, slots_c in enumerate(slots):
        expected = F.scaled_dot_product_attention(
            q[row][None, :, None].double(),
            keys[slots_c].transpose(0, 1)[None].double(),
            values[slots_c].transpose(0, 1)[None].double(),
            scale=0.3,
            enable_gqa=True,
        )[0, :, 0]
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-4, atol=1e-4)
    assert (out[-1] == 7).all()


def test_what_is_not_finite_stays_so(kernels: Kernels) -> None:
    keys, values, q = torch.ones(70, 1, 8), torch.ones(70, 1, 8), torch.ones(1, 1, 8)
    keys[3, 0, 2] = float("nan")
    out = torch.zeros(1, 1, 8)
    kernels.decode_attention_(out, q, keys, values, [(0, torch.arange(70))], 1.0)
    assert out.isnan().all()


def test_the_file_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if compiled_kernels() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("POLYLENS_CACHE", str(tmp_path))
    assert compiled_kernels.__wrapped__() is not None
    (kept,) = (tmp_path / "native").iterdir()
    assert kept.suffix == ".so"
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiled_kernels.__wrapped__() is not None


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF" + bytes(60)])
def test_a_damaged_file_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes) -> None:
    if compiled_kernels() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("POLYLENS_CACHE", str(tmp_path))
    kept = library.kernels_file(library.find_compiler())
    kept.parent.mkdir()
    kept.write_bytes(content)
    assert compiled_kernels.__wrapped__() is not None
    assert kept.read_bytes() != content
    assert list(kept.parent.iterdir()) == [kept]


def test_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it holds is used; without it the kernels are compiled for this process, and nothing stays behind."""
    if compiled_kernels() is None:
        pytest.skip("no C compiler here")
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(library.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("POLYLENS_CACHE", str(tmp_path / "file"))
    assert compiled_kernels.__wrapped__() is not None
    assert "cannot keep the compiled kernels" in caplog.text
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_working_compiler_there_are_none_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, compiler: str
) -> None:
    monkeypatch.setenv("POLYLENS_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(library.shutil, "which", lambda name: f"/bin/{name}" if name == "false" else None)
    assert compiled_kernels.__wrapped__() is None
    assert "decoding runs without compiled kernels" in caplog.text
    assert not list(tmp_path.rglob("*.so"))
