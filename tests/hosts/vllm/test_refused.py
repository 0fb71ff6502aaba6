"""What the worker cannot adapt, told to the front process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polylens.errors import AdapterMismatchError
from polylens.hosts.vllm import refused


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("POLYLENS_CACHE", str(tmp_path))
    monkeypatch.setattr(refused, "vllm_version", lambda: "0.32.0")
    return SimpleNamespace(model="m", hf_config=SimpleNamespace(to_dict=lambda: {"layers": 2}))


def test_what_was_told_is_read(config: Any):
    assert refused.told_refused(config) == {}
    refused.tell_refused(config, {"embed_tokens": "takes no change"})
    assert refused.told_refused(config) == {"embed_tokens": "takes no change"}


def test_an_adapter_is_refused_by_name_and_reason():
    refused.check_layers(["q_proj"], {"norm": "takes no change"}, "a")
    with pytest.raises(AdapterMismatchError, match=r"adapter 'a' .* norm: takes no change; and 1 more"):
        refused.check_layers(["q_proj", "norm", "embed"], {"norm": "takes no change", "embed": "no"}, "a")
