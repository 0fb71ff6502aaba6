"""Model folders that are wrong: one clear line each, and nothing loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from polylens.config import EngineConfig
from polylens.errors import ModelLoadError
from polylens.models.loading import load_model

Checkpoint = Callable[[str], Path]


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A Qwen2.5-VL checkpoint of the test's own, to be broken."""
    return Path(shutil.copytree(checkpoint("qwen2_5_vl"), tmp_path / "model"))


def refused(folder: Path | str, match: str, **settings: object) -> None:
    with pytest.raises(ModelLoadError, match=match) as error:
        load_model(folder, EngineConfig(**settings))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_no_such_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "does not exist")


def test_a_file_is_no_model(folder: Path) -> None:
    refused(folder / "config.json", "is a file")


def test_a_missing_vocabulary_is_refused(folder: Path) -> None:
    for name in ("tokenizer.json", "vocab.json"):
        (folder / name).unlink(missing_ok=True)
    refused(folder, "has no tokenizer")


def test_a_broken_chat_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for message in messages %}")
    refused(folder, "template")


def test_missing_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(name for name in tensors if "q_proj.weight" in name))
    save_file(tensors, file, metadata={"format": "pt"})
    refused(folder, "incomplete: 1 missing")


def test_a_model_is_not_changed_by_who_saves_over_its_files(folder: Path) -> None:
    model = load_model(folder, EngineConfig(show_progress=False)).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as content:  # the same file, as long as before
            content.write(bytes(file.stat().st_size))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_weight_of_another_shape_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj.weight" in name)
    tensors[name] = torch.zeros(3, 5)
    save_file(tensors, file, metadata={"format": "pt"})
    refused(folder, "q_proj")


def test_truncated_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    refused(folder, "cannot load model")


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    refused(folder, "JSON")


def test_a_quantised_model_is_refused(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    refused(folder, "16-bit base")


def test_another_kind_of_model_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    refused(folder, "vision-language")


def test_a_model_that_generates_no_text_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "pi0"}))
    refused(folder, "does not generate text")


def test_a_model_that_generates_text_by_diffusion_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "diffusion_gemma"}))
    refused(folder, "token by token")


@pytest.mark.parametrize("device", ["cuda:99", "meta", "abacus"])
def test_a_device_that_cannot_be_used_is_refused(folder: Path, device: str) -> None:
    refused(folder, "device", device=device)


def test_a_context_beyond_the_models_is_refused(folder: Path) -> None:
    refused(folder, "context length", max_model_len=10**9)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_broken_generation_config_is_refused(folder: Path, content: str) -> None:
    """transformers would pass over it, and the answers would end and be drawn in another way than the model says."""
    (folder / "generation_config.json").write_text(content)
    refused(folder, r"generation_config\.json")


def test_a_model_may_have_no_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    load_model(folder, EngineConfig())
