from __future__ import annotations

import itertools

import pytest
import torch

from polylens.errors import InternalError
from polylens.lora.arena import ALIGN_BYTES, pack
from tests.lora.toys import make_delta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_deltas_are_equal_aligned_views_of_one_buffer(dtype: torch.dtype) -> None:
    deltas = {name: make_delta(name, 5, 7, rank, rank, dtype) for rank, name in enumerate("abc", start=1)}
    buffer, packed = pack(deltas)
    assert list(packed) == list(deltas)
    storage = buffer.untyped_storage().data_ptr()
    for name, delta in packed.items():
        assert torch.equal(delta.a, deltas[name].a)
        assert torch.equal(delta.b, deltas[name].b)
        assert (delta.layer, delta.scaling) == (name, deltas[name].scaling)
        for tensor in (delta.a, delta.b):
            assert tensor.is_contiguous()
            assert tensor.untyped_storage().data_ptr() == storage
            assert (tensor.data_ptr() - buffer.data_ptr()) % ALIGN_BYTES == 0
    ends = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for d in packed.values() for t in (d.a, d.b))
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(ends))


def test_nothing_to_pack() -> None:
    buffer, packed = pack({})
    assert buffer.numel() == 0
    assert packed == {}


def test_mixed_dtypes_are_refused() -> None:
    with pytest.raises(InternalError, match="differ in dtype"):
        pack({"a": make_delta("a", 5, 7, 1, 0), "b": make_delta("b", 5, 7, 1, 0, torch.float32)})
