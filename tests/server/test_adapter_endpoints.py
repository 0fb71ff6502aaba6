"""Adapters loaded and unloaded over HTTP."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polylens.adapters.load import load_adapter
from polylens.engine.engine import Engine
from polylens.errors import AdapterError
from polylens.server.options import AdapterPolicy, ServerOptions
from polylens.server.start import adapters_below
from tests.families.adapters import make_adapter
from tests.server.conftest import Serve, Shop
from tests.server.local import Local
from tests.server.media import PICTURE, QUESTION, ask, png_url

LOAD, UNLOAD, CHAT = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/chat/completions"


@pytest.fixture
def options(shop: Shop) -> ServerOptions:
    return ServerOptions(("tiny",), adapters=AdapterPolicy(loading=True, root=shop.folder / "adapters"))


@pytest.fixture
def server(serve: Serve, options: ServerOptions) -> Local:
    return serve(options)


def load(server: Local, name: str, path: Any, status: int = 200, **more: Any) -> dict[str, Any]:
    answer = server.http.post(LOAD, json={"lora_name": name, "lora_path": str(path), **more})
    assert answer.status_code == status, answer.text
    return answer.json()


def unload(server: Local, name: str, status: int = 200) -> dict[str, Any]:
    answer = server.http.post(UNLOAD, json={"lora_name": name})
    assert answer.status_code == status, answer.text
    return answer.json()


def text(server: Local, model: str) -> str:
    asked = {"model": model, "messages": ask(QUESTION, png_url(PICTURE)), "temperature": 0, "max_tokens": 8}
    answer = server.http.post(CHAT, json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_load_use_unload(server: Local, shop: Shop):
    base = text(server, "tiny")
    report = load(server, "new", shop.spare)["report"]
    assert report["components"].keys() == {"connector"}
    assert text(server, "new") != base
    assert "new" in [card["id"] for card in server.http.get("/v1/models").json()["data"]]
    assert unload(server, "new")["freed_bytes"] > 0
    answer = server.http.post(CHAT, json={"model": "new", "messages": ask(QUESTION)})
    assert answer.status_code == 404
    unload(server, "new", status=404)
    server.settle()


def test_a_relative_path_is_below_the_root(server: Local):
    load(server, "new", "spare")
    unload(server, "new")


def test_the_same_again_changes_nothing_and_other_content_needs_load_inplace(server: Local, shop: Shop):
    assert load(server, "new", shop.spare)["changed"]
    first = text(server, "new")
    assert not load(server, "new", shop.spare)["changed"]
    refused = load(server, "new", shop.adapters["words"], status=400)
    assert refused["error"]["code"] == "adapter_conflict"
    assert text(server, "new") == first
    assert load(server, "new", shop.adapters["words"], load_inplace=True)["changed"]
    assert text(server, "new") == text(server, "words")
    unload(server, "new")


def test_the_bases_name_is_taken(server: Local, shop: Shop):
    assert load(server, "tiny", shop.spare, status=400)["error"]["param"] == "lora_name"


def test_off_unless_enabled(serve: Serve, shop: Shop):
    server = serve(ServerOptions(("tiny",)))
    load(server, "new", shop.spare, status=403)
    unload(server, "eyes", status=403)


@pytest.mark.parametrize(
    "path", ["/etc", "..", "../model", ".", "", "nowhere", "spare/adapter_config.json", "a\0b", "org/name", "x" * 5000]
)
def test_paths_elsewhere_are_refused(server: Local, path: str):
    answer = server.http.post(LOAD, json={"lora_name": "new", "lora_path": path})
    assert answer.status_code in (400, 403)
    assert answer.json()["error"]["param"] == "lora_path"


def test_links_are_resolved_first(server: Local, shop: Shop, tmp_path: Path):
    root = shop.folder / "adapters"
    outside = tmp_path / "outside"
    shutil.copytree(shop.spare, outside)
    (root / "link").symlink_to(outside)
    half = root / "half"
    shutil.copytree(shop.spare, half)
    (half / "adapter_model.safetensors").unlink()
    (half / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    (root / "inner").symlink_to(shop.spare)
    load(server, "new", "link", status=403)
    load(server, "new", "half", status=403)
    load(server, "new", "inner")
    unload(server, "new")


def test_a_pickle_is_refused(server: Local, shop: Shop):
    folder = shop.folder / "adapters" / "pickled"
    shutil.copytree(shop.spare, folder)
    weights = folder / "adapter_model.safetensors"
    torch.save(load_file(weights), folder / "adapter_model.bin")
    weights.unlink()
    assert "pickle" in load(server, "new", folder, status=400)["error"]["message"]


def test_a_broken_adapter_leaves_the_old_one(server: Local, shop: Shop):
    load(server, "new", shop.spare)
    before = text(server, "new")
    folder = shop.folder / "adapters" / "broken"
    shutil.copytree(shop.spare, folder)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert load(server, "new", folder, status=400, load_inplace=True)["error"]["code"] == "bad_adapter"
    assert text(server, "new") == before
    unload(server, "new")


def test_an_adapter_in_use_is_used_to_the_end(server: Local, shop: Shop):
    load(server, "new", shop.spare)
    asked = {"model": "new", "messages": ask(QUESTION), "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    expected = server.http.post(CHAT, json=asked).json()["choices"][0]["message"]["content"]
    with server.http.stream("POST", CHAT, json={**asked, "stream": True}) as response:
        arrived = response.iter_lines()
        first = next(arrived)
        load(server, "new", shop.adapters["words"], load_inplace=True)
        events = [first, *arrived]
    pieces = [line for line in events if '"content":' in line]
    assert "".join(json.loads(line[6:])["choices"][0]["delta"]["content"] for line in pieces) == expected
    unload(server, "new")
    server.settle()


def test_pinned_and_prefetched_are_on_the_device(server: Local, shop: Shop):
    for wanted in ("pinned", "prefetch"):
        load(server, "new", shop.spare, **{wanted: True})
        cards = {card["name"]: card for card in server.http.get("/stats").json()["adapters"]}
        assert cards["new"]["on_device"]
        assert cards["new"]["components"] == ["connector"]
        unload(server, "new")


def test_registered_adapters_are_read_when_asked_for(server: Local, shop: Shop, engine: Engine):
    engine.registry.register("lazy", shop.spare)
    card = next(card for card in server.http.get("/stats").json()["adapters"] if card["name"] == "lazy")
    assert card["bytes"] is None
    load(server, "new", shop.spare)
    assert text(server, "lazy") == text(server, "new")
    unload(server, "lazy")
    unload(server, "new")
    server.settle()


def test_thousands_may_be_registered(server: Local, shop: Shop, engine: Engine):
    names = [f"one-of-many-{number}" for number in range(3000)]
    before = engine.registry.stats()
    for name in names:
        engine.registry.register(name, shop.spare)
    load(server, "new", shop.spare)
    assert text(server, names[1234]) == text(server, "new")
    assert len(server.http.get("/v1/models").json()["data"]) >= 3000
    stats = server.http.get("/stats").json()
    assert stats["registered"] >= 3000
    assert len(stats["adapters"]) == 200
    assert {"eyes", "words", "new", names[1234]} <= {card["name"] for card in stats["adapters"]}
    assert engine.registry.stats().num_reads == before.num_reads + 2
    answer = server.http.post(CHAT, json={"model": "nobody", "messages": ask(QUESTION)}).json()
    assert "more" in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 1000
    for name in [*names, "new"]:
        engine.registry.unload(name)
    server.settle()


def test_folders_become_names(shop: Shop, tmp_path: Path):
    shutil.copytree(shop.spare, tmp_path / "a" / "b")
    shutil.copytree(shop.spare, tmp_path / "c")
    assert adapters_below(tmp_path) == {"a/b": tmp_path / "a" / "b", "c": tmp_path / "c"}
    (tmp_path / "c" / "adapter_model.safetensors").rename(tmp_path / "c" / "adapter_model.bin")
    with pytest.raises(AdapterError, match="pickle"):
        adapters_below(tmp_path)


def test_a_default_adapter_is_for_pictures_only(serve: Serve, options: ServerOptions):
    server = serve(replace(options, default_adapters={"image": "eyes"}))
    assert text(server, "tiny") == text(server, "eyes")
    asked = {"messages": ask(QUESTION), "temperature": 0, "max_tokens": 8}
    with_default, plain = (
        here.http.post(CHAT, json={"model": "tiny", **asked}).json()["choices"][0]["message"]["content"]
        for here in (server, serve(options))
    )
    assert with_default == plain


def test_adapters_made_elsewhere_are_named_in_the_refusal(server: Local, shop: Shop, tmp_path: Path):
    other = make_adapter(shop.model, shop.folder / "adapters" / "other", targets="language", seed=3)
    weights = load_file(other / "adapter_model.safetensors")
    save_file(
        {name: tensor[..., :-1].contiguous() for name, tensor in weights.items()}, other / "adapter_model.safetensors"
    )
    message = load(server, "new", other, status=400)["error"]["message"]
    assert "q_proj" in message or "layers" in message


def test_a_pickle_put_in_place_later_is_not_read(server: Local, shop: Shop, engine: Engine):
    """An adapter that is only registered is read, and read again, long after it was looked at."""
    folder = shop.folder / "adapters" / "swapped"
    shutil.copytree(shop.spare, folder)
    engine.registry.register("swapped", folder)
    weights = folder / "adapter_model.safetensors"
    torch.save(load_file(weights), folder / "adapter_model.bin")
    weights.unlink()
    answer = server.http.post(CHAT, json={"model": "swapped", "messages": ask(QUESTION)})
    assert answer.status_code == 400
    assert "pickle" in answer.json()["error"]["message"]
    unload(server, "swapped")
    server.settle()


def test_a_template_in_the_folder_is_used_and_told(server: Local, shop: Shop):
    folder = Path(shutil.copytree(shop.spare, shop.folder / "adapters" / "own"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    report = load(server, "own", "own")["report"]
    assert report["processing"] == ["chat template"]
    body = {"model": "own", "messages": [{"role": "user", "content": "what is"}], "return_token_strs": True}
    told = server.http.post("/tokenize", json=body).json()
    assert told["tokens"] == server.http.post("/tokenize", json={"prompt": "what is"}).json()["tokens"]
    answer = server.http.post(CHAT, json={"model": "own", "messages": body["messages"], "logprobs": True})
    assert answer.json()["usage"]["prompt_tokens"] == told["count"]
    (folder / "chat_template.jinja").write_text("{{ messages.__class__ }}")
    error = load(server, "own", "own", 400, load_inplace=True)["error"]
    assert "__class__" in error["message"]
    unload(server, "own")


def test_a_load_that_takes_long_holds_up_no_answer(server: Local, shop: Shop, monkeypatch: pytest.MonkeyPatch):
    reading, go_on = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        reading.set()
        assert go_on.wait(60)
        return load_adapter(*args, **options)

    monkeypatch.setattr("polylens.engine.adapter_files.load_adapter", slow)
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(load, server, "slow", shop.spare)
        assert reading.wait(60)
        before = text(server, "eyes")
        assert server.http.post(CHAT, json={"model": "slow", "messages": ask(QUESTION)}).status_code == 404
        assert not loaded.done()
        go_on.set()
        assert loaded.result()["changed"]
    assert text(server, "eyes") == before
    assert text(server, "slow") != before
    unload(server, "slow")


# ---- hub ids


@pytest.fixture
def hub(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the hub's client has fetched: `org/spare`, and `org/pickled`. Returns the client's cache folder."""
    for name in ("spare", "pickled"):
        fetched = tmp_path / "hub" / f"models--org--{name}"
        shutil.copytree(shop.spare, fetched / "snapshots" / "abc")
        (fetched / "refs").mkdir()
        (fetched / "refs" / "main").write_text("abc")
    weights = tmp_path / "hub" / "models--org--pickled" / "snapshots" / "abc" / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.mark.usefixtures("hub")
def test_hub_ids_are_loaded_where_that_is_allowed(serve: Serve, options: ServerOptions, server: Local, shop: Shop):
    load(server, "new", "org/spare", status=403)  # not allowed here
    allowed = serve(replace(options, adapters=AdapterPolicy(loading=True, hub=True)))
    load(allowed, "new", "org/spare")
    card = next(card for card in allowed.http.get("/v1/models").json()["data"] if card["id"] == "new")
    assert "models--org--spare" in card["root"]
    load(server, "local", shop.spare)
    assert text(allowed, "new") == text(allowed, "local")
    unload(server, "local")
    unload(allowed, "new")
    assert "pickle" in load(allowed, "new", "org/pickled", status=400)["error"]["message"]
    message = load(allowed, "new", "org/unknown", status=400)["error"]["message"]
    assert "cannot be fetched" in message
    assert "\n" not in message
    for path in (shop.spare, "org/../spare", "../org/spare", "org", "https://hub.example/org/spare"):
        load(allowed, "new", path, status=403)
    # A folder of that name where the server runs is not what was allowed.
    shutil.copytree(shop.spare, Path("org") / "spare")
    load(allowed, "new", "org/spare", status=403)
