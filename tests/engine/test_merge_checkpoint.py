"""`merge_checkpoint` against PEFT's merged model, loaded back by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from polylens.engine.merge_checkpoint import merge_checkpoint
from polylens.errors import AdapterError, ModelLoadError
from tests.families.adapters import make_adapter
from tests.families.special import make_special

CheckpointOf = Callable[[str], Path]


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForImageTextToText.from_pretrained(folder).state_dict()


def peft_state(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    base = AutoModelForImageTextToText.from_pretrained(model)
    return PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().state_dict()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-5, msg=name)


def test_equals_peft(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    model = checkpoint("qwen2_vl")
    adapter = make_special(model, tmp_path / "adapter", "dora with biases", seed=5)
    report = merge_checkpoint(model, adapter, tmp_path / "out")
    assert_same(state_of(tmp_path / "out"), peft_state(model, adapter))
    assert report.num_changed > 10
    assert not report.untied
    base_files = {file.name for file in model.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == base_files
    assert [one.name for one in tmp_path.iterdir()].count("out") == 1
    weights, config = (tmp_path / "out" / name for name in ("model.safetensors", "config.json"))
    assert weights.stat().st_mode == config.stat().st_mode  # whoever may read the config may read the weights


@pytest.mark.parametrize("kind", ["experts", "experts and router"])
def test_experts_that_are_stored_inputs_first(kind: str, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    model = checkpoint("qwen3_vl_moe")
    adapter = make_special(model, tmp_path / "adapter", kind, seed=5)
    merge_checkpoint(model, adapter, tmp_path / "out")
    assert_same(state_of(tmp_path / "out"), peft_state(model, adapter))


def test_several_shards_in_the_checkpoints_own_dtype(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    model = tmp_path / "model"
    base = AutoModelForImageTextToText.from_pretrained(checkpoint("gemma3"), dtype=torch.bfloat16)
    base.save_pretrained(model, max_shard_size="60KB")
    adapter = make_adapter(checkpoint("gemma3"), tmp_path / "adapter", targets="all", seed=5)
    report = merge_checkpoint(model, adapter, tmp_path / "out")
    assert report.num_shards > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    old = json.loads((model / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == old["weight_map"]
    found = state_of(tmp_path / "out")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    before = state_of(model)
    expected = peft_state(checkpoint("gemma3"), adapter)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.float(), expected[name], atol=2e-2, rtol=2e-2)
    changed = [name for name in found if not torch.equal(found[name], before[name])]
    assert len(changed) == report.num_changed


def test_a_tied_head_gets_its_own_weights(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    model = checkpoint("gemma3")
    adapter = make_special(model, tmp_path / "adapter", "head saved", seed=5)
    report = merge_checkpoint(model, adapter, tmp_path / "out")
    assert report.untied
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    found, before = state_of(tmp_path / "out"), state_of(model)
    embedding = "model.language_model.embed_tokens.weight"
    assert torch.equal(found[embedding], before[embedding])
    saved = load_file(adapter / "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    assert torch.equal(found["lm_head.weight"], saved)


def test_nothing_is_written_where_something_is_wrong(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    model = checkpoint("qwen2_vl")
    adapter = make_adapter(checkpoint("llava"), tmp_path / "adapter", targets="tower", seed=5)
    with pytest.raises(AdapterError):
        merge_checkpoint(model, adapter, tmp_path / "out")
    with pytest.raises(ModelLoadError, match="is not an empty folder"):
        merge_checkpoint(model, adapter, model)
    assert [one.name for one in tmp_path.iterdir()] == ["adapter"]
