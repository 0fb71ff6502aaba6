"""`polylens run`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polylens import LLM, Completion, SamplingParams
from polylens.cli import main
from tests.cli.conftest import Shop
from tests.cli.process import Done, assert_refused, polylens, polylens_process
from tests.families.adapters import make_adapter
from tests.families.build import build_checkpoint

QUESTION = "What is it?"


def run(shop: Shop, *more: str | Path, by: Callable[..., Done] = polylens) -> Done:
    return by("run", shop.model, *shop.adapters, "--prompt", QUESTION, "--max-tokens", 8, *more)


@pytest.fixture(scope="module")
def expected(shop: Shop) -> dict[str, Completion]:
    """What the Python API answers about the picture: by adapter, and by the base."""
    content = [{"type": "image", "image": shop.image}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    with LLM(shop.model, adapters={"eyes": shop.eyes, "words": shop.words}) as llm:
        names = {"base": None, "eyes": "eyes", "words": "words"}
        return {use: llm.chat(messages, name, SamplingParams(max_tokens=8)) for use, name in names.items()}


def test_json_has_the_answer_of_the_python_api(shop: Shop, expected: dict[str, Completion]):
    more = ["--use", "eyes", "--image", shop.image, "--json"]
    done = run(shop, *more, by=polylens_process)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer, right = json.loads(done.stdout), expected["eyes"]
    assert answer == {
        "text": right.text,
        "token_ids": list(right.token_ids),
        "finish_reason": right.finish_reason.value,
        "usage": {
            "prompt_tokens": right.usage.prompt_tokens,
            "completion_tokens": len(right.token_ids),
            "cached_tokens": 0,
        },
    }
    assert len({completion.token_ids for completion in expected.values()}) == 3


def test_without_use_and_json_the_base_s_text_is_printed(shop: Shop, expected: dict[str, Completion]):
    done = run(shop, "--image", shop.image)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected["base"].text + "\n"


def test_what_an_adapter_s_folder_brings_is_told_and_can_be_turned_off(shop: Shop, expected: dict[str, Completion]):
    folder = Path(shutil.copytree(shop.eyes, shop.folder / "own"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    arguments = ["--adapter", f"own={folder}", "--use", "own", "--image", shop.image, "--json"]
    done = run(shop, *arguments)
    first, second = done.stderr.splitlines()
    assert first == "polylens: adapter 'own' has its own chat template"
    assert second == "polylens: error: this model's chat template takes text only, no pictures or videos"
    done = run(shop, *arguments, "--no-adapter-template")
    assert done.stderr == ""
    assert json.loads(done.stdout)["token_ids"] == list(expected["eyes"].token_ids)
    assert "processor   chat_template.jinja" in polylens("inspect", folder).stdout


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


def test_too_little_memory_is_refused(shop: Shop):
    assert_refused(run(shop, "--kv-bytes", 1), "kv_bytes=1 is too small for any request")


def adapter_copy(shop: Shop, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shop.words, tmp_path / "copy"))


def test_a_truncated_adapter_is_refused(shop: Shop, tmp_path: Path):
    folder = adapter_copy(shop, tmp_path)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    done = polylens("run", shop.model, "--adapter", folder, "--prompt", "x")
    assert_refused(done, "adapter_model.safetensors")


def test_an_adapter_of_another_model_is_refused(shop: Shop, tmp_path: Path):
    other = build_checkpoint("llava", tmp_path / "other")
    adapter = make_adapter(other, tmp_path / "foreign", targets="all", seed=1)
    done = polylens("run", shop.model, "--adapter", adapter, "--prompt", "x")
    assert_refused(done, "foreign")


def test_fields_of_a_request_are_taken_as_the_server_takes_them(shop: Shop):
    done = run(shop, "--use", "words", "--fields", '{"guided_choice": ["left", "right"], "top_k": -1}')
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("left", "right")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--fields", "{"], "--fields is not JSON"),
        (["--fields", "[]"], "--fields must be a JSON object"),
        (["--fields", '{"surprise": 1}'], "'surprise' is not supported"),
        (["--fields", '{"n": 2}'], "'n'"),
        (["--max-tokens", "3", "--fields", '{"max_tokens": 2}'], "'max_tokens'"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-k", "-2"], "top_k"),
    ],
)
def test_wrong_fields_are_refused_before_the_model_is_loaded(
    arguments: list[str], word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("polylens.cli.run.open_llm", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(sys, "argv", ["polylens", "run", "m", "--prompt", "x", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert word in capsys.readouterr().err
