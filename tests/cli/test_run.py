"""`polylens run` as a process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from polylens import LLM, SamplingParams
from tests.cli.conftest import Shop
from tests.cli.process import assert_refused, polylens


def run(shop: Shop, *more: str | Path):
    return polylens("run", shop.model, *shop.adapters, "--prompt", "What is it?", "--max-tokens", 8, *more)


def test_answers_are_those_of_the_python_api(shop: Shop):
    done = run(shop, "--use", "eyes", "--image", shop.image, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer.keys() == {"text", "token_ids", "finish_reason", "usage"}
    assert answer["usage"].keys() == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    content = [{"type": "image", "image": shop.image}, {"type": "text", "text": "What is it?"}]
    with LLM(shop.model, adapters={"eyes": shop.eyes}) as llm:
        expected = llm.chat([{"role": "user", "content": content}], "eyes", SamplingParams(max_tokens=8))
    assert answer["token_ids"] == list(expected.token_ids)
    assert answer["text"] == expected.text
    assert answer["finish_reason"] == expected.finish_reason
    assert answer["usage"]["completion_tokens"] == len(expected.token_ids)


def test_without_json_only_the_text_is_printed(shop: Shop):
    plain = run(shop, "--image", shop.image)
    full = run(shop, "--image", shop.image, "--json", "--use", "base")
    assert plain.returncode == 0
    assert plain.stdout == json.loads(full.stdout)["text"] + "\n"


def test_adapters_differ(shop: Shop):
    answers = {use: json.loads(run(shop, "--use", use, "--json").stdout)["token_ids"] for use in ("base", "words")}
    assert answers["base"] != answers["words"]


def broken_picture(shop: Shop, kind: str) -> Path:
    file = shop.folder / f"{kind}.png"
    content = shop.image.read_bytes()
    file.write_bytes({"empty": b"", "text": b"hello", "half": content[: len(content) // 2]}[kind])
    return file


@pytest.mark.parametrize("kind", ["empty", "text", "half"])
def test_a_broken_picture_is_refused(shop: Shop, kind: str):
    file = broken_picture(shop, kind)
    assert_refused(run(shop, "--image", file), str(file))


def test_a_missing_picture_is_refused(shop: Shop):
    assert_refused(run(shop, "--image", "none.png"), "none.png")


def test_a_prompt_longer_than_the_context_is_refused(shop: Shop):
    assert_refused(run(shop, "--max-model-len", 8), "context")


def adapter_copy(shop: Shop, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shop.words, tmp_path / "copy"))


def test_a_truncated_adapter_is_refused(shop: Shop, tmp_path: Path):
    folder = adapter_copy(shop, tmp_path)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    done = polylens("run", shop.model, "--adapter", folder, "--prompt", "x")
    assert_refused(done, "adapter_model.safetensors")


def test_an_adapter_of_another_model_is_refused(shop: Shop, tmp_path: Path):
    other = tmp_path / "other"
    from tests.families.adapters import make_adapter
    from tests.families.build import build_checkpoint

    adapter = make_adapter(build_checkpoint("llava", other), tmp_path / "foreign", targets="all", seed=1)
    done = polylens("run", shop.model, "--adapter", adapter, "--prompt", "x")
    assert_refused(done, "foreign")
