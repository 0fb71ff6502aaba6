"""What polylens refuses inside vLLM, and that a vLLM that has changed is noticed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from polylens.errors import ModelLoadError
from polylens.hosts.vllm import seams


def config(**changed: Any) -> Any:
    plain = {
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        "model_config": SimpleNamespace(runner_type="generate", dtype="bfloat16"),
        "compilation_config": SimpleNamespace(cudagraph_mm_encoder=False, mode=SimpleNamespace(name="NONE")),
        "quant_config": None,
        "speculative_config": None,
        "cache_config": SimpleNamespace(kv_sharing_fast_prefill=False),
        "lora_config": SimpleNamespace(target_modules=None, lora_dtype="bfloat16"),
    }
    return SimpleNamespace(**{**plain, **changed})


def test_a_plain_vllm_is_served():
    assert seams.refusal(config()) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"parallel_config": SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)}, "tensor parallel 2"),
        ({"parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=2)}, "pipeline parallel 2"),
        ({"quant_config": object()}, "quantised"),
        ({"speculative_config": object()}, "speculative"),
        ({"model_config": SimpleNamespace(runner_type="pooling")}, "pooling"),
        ({"lora_config": SimpleNamespace(target_modules=["q_proj"])}, "target_modules"),
        ({"lora_config": SimpleNamespace(lora_dtype="float16")}, "lora_dtype float16"),
        ({"model_config": SimpleNamespace(runner_type="generate", enable_prompt_embeds=True)}, "prompts of embeddings"),
        ({"cache_config": SimpleNamespace(kv_sharing_fast_prefill=True)}, "kv_sharing_fast_prefill"),
        (
            {"compilation_config": SimpleNamespace(cudagraph_mm_encoder=True, mode=SimpleNamespace(name="NONE"))},
            "CUDA graphs",
        ),
        (
            {"compilation_config": SimpleNamespace(cudagraph_mm_encoder=False, mode=SimpleNamespace(name="VLLM"))},
            "enforce-eager",
        ),
    ],
)
def test_what_is_not_done_yet_is_refused_in_one_line(changed: dict[str, Any], words: str):
    reason = seams.refusal(config(**changed))
    assert reason is not None
    assert words in reason
    assert "\n" not in reason


class Changed:
    def load_lora_model(self, model: Any) -> None: ...


def test_seams_are_checked_by_name_and_parameters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(seams, "vllm_version", lambda: "0.32.0")
    assert seams.check_seam(Changed, "load_lora_model", ("model",)) is Changed.load_lora_model
    with pytest.raises(ModelLoadError, match="no parameter 'device'"):
        seams.check_seam(Changed, "load_lora_model", ("model", "device"))
    with pytest.raises(ModelLoadError, match="is gone"):
        seams.check_seam(Changed, "set_active_loras", ())


@pytest.mark.parametrize("found", ["0.33.0", "0.31.2", "1.0"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, found: str):
    monkeypatch.setattr(seams, "vllm_version", lambda: found)
    with pytest.raises(ModelLoadError, match=f"found {found}"):
        seams.check_version()


def test_the_tested_version_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(seams, "vllm_version", lambda: "0.32.0")
    seams.check_version()


def test_a_missing_vllm_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(seams, "PACKAGES", ("no-such-package-as-this",))
    with pytest.raises(ModelLoadError, match="not installed"):
        seams.check_version()
