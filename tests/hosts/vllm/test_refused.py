"""What the worker cannot adapt, told to the front process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polylens.errors import AdapterMismatchError, ModelLoadError
from polylens.hosts.vllm import refused


def config(**changed: Any) -> Any:
    limits = changed.pop("limits", {"image": 1})
    media = SimpleNamespace(get_limit_per_prompt=lambda name: limits.get(name, 999))
    plain = {"model": "m", "dtype": "float32", "hf_config": SimpleNamespace(to_dict=lambda: {"layers": 2})}
    return SimpleNamespace(model_config=SimpleNamespace(**{**plain, "multimodal_config": media, **changed}))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("POLYLENS_CACHE", str(tmp_path))
    monkeypatch.setattr(refused, "vllm_version", lambda: "0.32.0")


def test_what_was_told_is_read():
    refused.tell_refused(config(), {"embed_tokens": "takes no change"})
    assert refused.told_refused(config()) == {"embed_tokens": "takes no change"}


@pytest.mark.parametrize("changed", [{"dtype": "bfloat16"}, {"limits": {"image": 0}}, {"multimodal_config": None}])
def test_what_another_engine_told_is_not_taken_for_ones_own(changed: dict[str, Any]):
    refused.tell_refused(config(**changed), {})
    with pytest.raises(ModelLoadError, match="POLYLENS_CACHE"):
        refused.told_refused(config())


def test_an_adapter_is_refused_by_name_and_reason():
    refused.check_layers(["q_proj"], {"norm": "takes no change"}, "a")
    with pytest.raises(AdapterMismatchError, match=r"adapter 'a' .* norm: takes no change; and 1 more"):
        refused.check_layers(["q_proj", "norm", "embed"], {"norm": "takes no change", "embed": "no"}, "a")
