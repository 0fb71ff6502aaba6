"""A request's tokens are made and read as the adapter version it leased says, whatever happens to name and files."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor

from polylens import LLM, ChatRequest, SamplingParams
from polylens.adapters.load import load_adapter
from polylens.core import Constraint
from polylens.engine.thread import EngineThread
from polylens.errors import AdapterConflictError, AdapterFormatError, AdapterMismatchError
from tests.families.adapters import make_adapter

FAMILY = "qwen2_5_vl"
MESSAGES = [{"role": "user", "content": "what is in the picture"}]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %} MARK"
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(checkpoint(FAMILY), tmp_path_factory.mktemp("plain") / "a", targets="all", rank=4, seed=1)


@pytest.fixture
def with_template(plain: Path, tmp_path: Path) -> Callable[[str], Path]:
    """`with_template(mark)`: the adapter with a template that ends with `mark`."""

    def make(mark: str) -> Path:
        folder = Path(shutil.copytree(plain, tmp_path / mark))
        (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARK", mark))
        return folder

    return make


@pytest.fixture
def llm(checkpoint: Callable[[str], Path]) -> LLM:
    return LLM(checkpoint(FAMILY))


def num_tokens(llm: LLM, text: str) -> int:
    return len(llm.processing().prepare_text(text).token_ids)


def test_a_template_is_part_of_the_content(llm: LLM, plain: Path, with_template: Callable[[str], Path]):
    first, second = with_template("first"), with_template("second")
    assert llm.load_adapter("a", first).processing == ("chat template",)
    assert not llm.load_adapter("a", first).changed
    for other in (second, plain):
        with pytest.raises(AdapterConflictError):
            llm.load_adapter("a", other)
    old = weakref.ref(llm.processing("a"))
    assert llm.load_adapter("a", second, replace=True).changed
    assert llm.chat(MESSAGES, "a", SHORT).usage.prompt_tokens == num_tokens(llm, "what is in the picture second")
    gc.collect()
    assert old() is None
    assert llm.load_adapter("a", plain, replace=True).changed
    assert llm.processing("a") is llm.processing()


def test_what_cannot_be_used_leaves_what_was_there(llm: LLM, with_template: Callable[[str], Path]):
    good, bad = with_template("good"), with_template("bad")
    (bad / "chat_template.jinja").write_text("{% for")
    llm.load_adapter("a", good)
    before = llm.processing("a")
    for name in ("a", "b"):
        with pytest.raises(AdapterFormatError, match=r"adapter '.*bad': the chat template .*adapter_templates"):
            llm.load_adapter(name, bad, replace=True)
    assert llm.adapters == ["a"]
    assert llm.processing("a") is before
    assert llm.registry.resident_bytes() == llm.registry.get("a").num_bytes


def test_a_request_keeps_the_version_it_leased(llm: LLM, with_template: Callable[[str], Path]):
    """The name is given another template while the request waits for its preparation."""
    first, second = with_template("first"), with_template("one more second")
    prepare, release = llm.engine.prepare, threading.Event()

    def slow(request: ChatRequest, **options: object) -> object:
        if request.request_id == "early":
            assert release.wait(10)
        return prepare(request, **options)

    async def main() -> list[int]:
        await thread.load_adapter("a", first)
        early = thread.submit(ChatRequest(MESSAGES, "a", SHORT, "early"))
        await thread.load_adapter("a", second, replace=True)
        late = thread.submit(ChatRequest(MESSAGES, "a", SHORT, "late"))
        counts = [(await late.completion()).usage.prompt_tokens]
        release.set()
        counts.append((await early.completion()).usage.prompt_tokens)
        await thread.check_integrity()
        return counts

    llm.engine.prepare = slow  # type: ignore[method-assign]
    thread = EngineThread(llm.engine, num_workers=2).start()
    late, early = asyncio.run(main())
    thread.stop()
    assert early == num_tokens(llm, "what is in the picture first")
    assert late == num_tokens(llm, "what is in the picture one more second")


def test_one_that_is_only_registered_is_read_before_its_request_is_prepared(
    llm: LLM, with_template: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    readers = []

    def read(*args: Any, **options: Any) -> Any:
        readers.append(threading.current_thread().name)
        return load_adapter(*args, **options)

    monkeypatch.setattr("polylens.engine.adapter_files.load_adapter", read)

    async def main() -> int:
        thread.registry.register("lazy", with_template("lazy"))
        handle = thread.submit(ChatRequest(MESSAGES, "lazy", SHORT))
        return (await handle.completion()).usage.prompt_tokens

    thread = EngineThread(llm.engine).start()
    assert asyncio.run(main()) == num_tokens(llm, "what is in the picture lazy")
    thread.stop()
    assert len(readers) == 1
    assert readers[0].startswith("polylens-prepare")


def test_tensors_that_come_and_go_change_no_template(
    checkpoint: Callable[[str], Path], with_template: Callable[[str], Path]
):
    folders = {name: with_template(name) for name in ("first", "second")}
    size = LLM(checkpoint(FAMILY), folders).registry.get("first").num_bytes
    # The same tensors count twice, and there is room for one: each request reads the files again.
    with LLM(checkpoint(FAMILY), folders, adapter_device_bytes=size, adapter_host_bytes=0) as llm:
        before = {name: llm.processing(name) for name in folders}
        for _ in range(2):
            for name in folders:
                answer = llm.chat(MESSAGES, name, SHORT)
                assert answer.usage.prompt_tokens == num_tokens(llm, f"what is in the picture {name}")
                assert llm.processing(name) is before[name]
        assert llm.registry.stats().num_moves_in >= 4
        (folders["first"] / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
        with pytest.raises(AdapterFormatError, match="have changed since it was loaded"):
            llm.chat(MESSAGES, "first", SHORT)


def test_answers_are_read_with_the_adapter_s_tokenizer(checkpoint: Callable[[str], Path], plain: Path, tmp_path: Path):
    """The added token can be typed by a constraint, and its text comes out."""
    folder = Path(shutil.copytree(plain, tmp_path / "added"))
    tokenizer = AutoProcessor.from_pretrained(checkpoint(FAMILY)).tokenizer
    tokenizer.add_tokens(["TWELVE"])
    tokenizer.save_pretrained(folder)
    sampling = SamplingParams(max_tokens=8, logit_bias={len(tokenizer) - 1: 100.0}, ignore_eos=True)
    with LLM(checkpoint(FAMILY), {"added": folder, "plain": plain}) as llm:
        requests = [ChatRequest(MESSAGES, name, sampling) for name in ("added", "plain", None)]
        added, without, base = llm.generate(requests)
        assert added.token_ids == (len(tokenizer) - 1,) * 8
        assert added.text == "TWELVE" * 8
        assert without.text == base.text == ""
        held = SamplingParams(max_tokens=20, constraint=Constraint("choice", ("TWELVE", "TWELVETWELVE")))
        answers = llm.generate([ChatRequest(MESSAGES, name, held) for name in ("added", "plain", None)])
        assert all(answer.text in ("TWELVE", "TWELVETWELVE") for answer in answers)
        assert len({llm.engine._toolbox.of(llm.processing(name)) for name in ("added", "plain", None)}) == 2


def test_more_token_ids_than_rows_are_refused(llm: LLM, checkpoint: Callable[[str], Path], plain: Path, tmp_path: Path):
    folder = Path(shutil.copytree(plain, tmp_path / "many"))
    rows = llm.loaded.model.get_input_embeddings().weight.shape[0]
    tokenizer = AutoProcessor.from_pretrained(checkpoint(FAMILY)).tokenizer
    tokenizer.add_tokens([f"<new{index}>" for index in range(rows - len(tokenizer) + 1)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(AdapterMismatchError, match=f"{rows + 1} token ids.*{rows} rows"):
        llm.load_adapter("many", folder)
    assert llm.adapters == []


def test_sums_have_what_their_parts_agree_on(llm: LLM, plain: Path, with_template: Callable[[str], Path]):
    folders = {"a": with_template("same"), "b": plain}
    for name, folder in folders.items():
        llm.load_adapter(name, folder)
    llm.combine_adapters("both", {"a": 0.5, "b": 0.5})
    llm.combine_adapters("twice", {"a": 0.5})
    assert llm.processing("both") is llm.processing()
    assert llm.processing("twice") is llm.processing("a")
