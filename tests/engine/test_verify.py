"""`verify` and its references: right adapters pass, and what is wrong is seen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from polylens.config import EngineConfig
from polylens.engine import merged, verify
from polylens.errors import AdapterMismatchError, RequestError
from polylens.models.loading import load_model
from tests.families.adapters import make_adapter
from tests.families.build import FAMILIES
from tests.families.media import picture

CheckpointOf = Callable[[str], Path]

FLOAT32 = EngineConfig(dtype="float32")


def small_pictures() -> list:
    return [picture(56, 56, 1), picture(84, 56, 2)]


def merged_weights(model: Path, adapter: Path, reference: str) -> dict[str, torch.Tensor]:
    loaded = load_model(model, FLOAT32)
    merge = merged.merge_with_peft if reference == "peft" else merged.merge_ourselves
    merge(loaded, adapter)
    return loaded.model.state_dict()


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_our_merge_is_peft_s(family: str, checkpoint: CheckpointOf, tmp_path: Path):
    model = checkpoint(family)
    adapter = make_adapter(model, tmp_path / "a", targets="all", seed=3, rank_pattern={"q_proj": 8, "fc1": 2})
    ours, theirs = (merged_weights(model, adapter, reference) for reference in ("own", "peft"))
    assert_same_weights(ours, theirs)
    base = load_model(model, FLOAT32).model.state_dict()
    changed = [name for name in base if not torch.equal(base[name], theirs[name])]
    assert len(changed) == len(load_file(adapter / "adapter_model.safetensors")) / 2


_SINCE_4_52 = [
    ("model.language_model.layers.", "language_model.model.layers."),
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.multi_modal_projector", "multi_modal_projector"),
    ("lm_head", "language_model.lm_head"),
]

OLD_NAMES = {
    "qwen2_5_vl": [("model.visual.", "visual."), ("model.language_model.layers.", "model.layers.")],
    "llava": _SINCE_4_52,
    "gemma3": _SINCE_4_52,
}


def as_once_written(adapter: Path, family: str, prefix: str = "base_model.model.") -> Path:
    """The adapter with the module names of transformers 4.51, in a folder beside it."""
    old = adapter.with_name(adapter.name + "-old")
    old.mkdir()
    tensors = {}
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        path = name.removeprefix("base_model.model.")
        for new_start, old_start in OLD_NAMES[family]:
            if path.startswith(new_start):
                path = old_start + path.removeprefix(new_start)
                break
        tensors[prefix + path] = tensor
    save_file(tensors, old / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    names = {re.sub(r"\.lora_[AB]\.weight$", "", name).removeprefix(prefix) for name in tensors}
    (old / "adapter_config.json").write_text(json.dumps({**config, "target_modules": sorted(names)}))
    return old


@pytest.mark.parametrize("family", OLD_NAMES)
@pytest.mark.parametrize("prefix", ["base_model.model.", "", "base_model.model.base_model.model."])
def test_old_names_are_merged_too(family: str, prefix: str, checkpoint: CheckpointOf, tmp_path: Path):
    model = checkpoint(family)
    adapter = make_adapter(model, tmp_path / "a", targets="all", seed=3, rank_pattern={"q_proj": 8})
    old = as_once_written(adapter, family, prefix)
    assert_same_weights(merged_weights(model, old, "peft"), merged_weights(model, adapter, "peft"))


def test_a_reference_that_misses_tensors_is_no_reference(
    checkpoint: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = checkpoint("qwen2_5_vl")
    old = as_once_written(make_adapter(model, tmp_path / "a", targets="all", seed=3), "qwen2_5_vl")
    # PEFT alone, without the renaming, only warns about the tensors it does not find.
    monkeypatch.setattr(merged, "_current_names", lambda _loaded, folder: nullcontext(folder))
    with pytest.raises(AdapterMismatchError, match="PEFT, the reference"):
        merged_weights(model, old, "peft")


def test_half_loaded_is_not_loaded(checkpoint: CheckpointOf, tmp_path: Path):
    model = checkpoint("qwen2_5_vl")
    adapter = make_adapter(model, tmp_path / "a", targets="connector", seed=3)
    tensors = load_file(adapter / "adapter_model.safetensors")
    wrapped = PeftModel.from_pretrained(load_model(model, FLOAT32).model, str(adapter))
    merged.check_all_loaded(wrapped, adapter)
    name = min(tensors)
    save_file({**tensors, name: tensors[name] + 1}, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterMismatchError, match="used 3 of the adapter's 4 tensors") as caught:
        merged.check_all_loaded(wrapped, adapter)
    assert caught.value.problems == (name.removeprefix("base_model.model."),)


@pytest.mark.parametrize("reference", ["peft", "own"])
def test_right_adapters_pass(reference: str, checkpoint: CheckpointOf, tmp_path: Path):
    model = checkpoint("qwen2_5_vl")
    adapters = {
        "all": make_adapter(model, tmp_path / "all", targets="all", seed=1),
        "words": make_adapter(model, tmp_path / "words", targets="language", seed=2),
    }
    result = verify.verify(model, adapters, images=small_pictures(), max_tokens=3, reference=reference)
    assert result.ok
    assert result.reference == reference
    for name, check in result.adapters.items():
        assert len(check.layers) == len(load_file(adapters[name] / "adapter_model.safetensors")) / 2
        assert all(layer.rows > 0 and layer.rel_err < 1e-4 for layer in check.layers)


def test_an_adapter_that_is_not_the_merged_one_fails(
    checkpoint: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = checkpoint("qwen2_5_vl")
    right = make_adapter(model, tmp_path / "right", targets="tower", seed=1)
    wrong = make_adapter(model, tmp_path / "wrong", targets="tower", seed=2)
    monkeypatch.setattr(verify, "merged_llm", lambda model, _path, **more: merged.merged_llm(model, wrong, **more))
    result = verify.verify(model, {"right": right}, images=small_pictures(), max_tokens=2)
    assert not result.ok
    check = result.adapters["right"]
    assert check.comparison.max_logit_error > 1e-2
    assert check.problems
    assert all(layer.rel_err > 1e-2 for layer in check.layers)


def test_rows_given_to_the_wrong_adapter_show(
    checkpoint: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The engine's own idea of whose rows are whose is wrong: pictures of a batch are swapped."""
    from polylens.lora.context import RoutingContext

    model = checkpoint("qwen2_5_vl")
    adapters = {name: make_adapter(model, tmp_path / name, targets="tower", seed=i) for i, name in enumerate("ab")}
    right = RoutingContext.encoder
    monkeypatch.setattr(
        RoutingContext, "encoder", lambda self, sizes, owners: right(self, sizes, list(reversed(list(owners))))
    )
    result = verify.verify(model, adapters, images=small_pictures(), max_tokens=2)
    assert not result.ok


def test_nothing_to_verify_is_an_error(checkpoint: CheckpointOf):
    with pytest.raises(RequestError, match="at least one adapter"):
        verify.verify(checkpoint("qwen2_5_vl"), {})


def test_the_reference_is_peft_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    assert merged.default_reference() == "peft"
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert merged.default_reference() == "own"


def test_own_pictures_are_unequal_and_always_the_same():
    first, second = verify.own_pictures(), verify.own_pictures()
    assert len({image.size for image in first}) == len(first)
    assert [image.tobytes() for image in first] == [image.tobytes() for image in second]
