"""The command line of `polylens serve`: flags, files of keys, and mistakes that are said before anything loads."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import httpx
import pytest

from polylens.cli.serve_flags import GROUPS, make_parser, with_flags
from polylens.cli.serve_options import engine_config, folder_named, lora_modules, server_options
from polylens.config import EngineConfig
from polylens.errors import ModelLoadError, PolylensError, RequestError
from polylens.models.loading import load_model as load
from polylens.server.options import ServerOptions
from polylens.server.run import listen
from polylens.server.start import model_defaults, stated_defaults
from tests.cli.process import assert_refused, polylens
from tests.server.conftest import Shop
from tests.server.process import serving

ROOT = Path(__file__).parents[2]


def options(*arguments: str) -> ServerOptions:
    return server_options(make_parser().parse_args(arguments))


def test_the_documented_flags_are_the_flags():
    page = (ROOT / "docs" / "serving.md").read_text()
    assert page == with_flags(page), "run: python -m polylens.cli.serve_flags"


def test_every_documented_path_is_served():
    from polylens.server.app import ENDPOINTS

    page = (ROOT / "docs" / "serving.md").read_text()
    for path, _, _ in ENDPOINTS:
        assert path.partition("{")[0] in page


def test_every_flag_is_read():
    """No flag is parsed and forgotten."""
    source = "".join((ROOT / f"src/polylens/cli/{name}.py").read_text() for name in ("serve", "serve_options"))
    for _, flags in GROUPS:
        for flag in flags:
            name = flag.name.replace("-", "_")
            assert flag.unneeded or f"arguments.{name}" in source or f'"{name}"' in source, flag.name


def test_modules_in_all_forms(tmp_path: Path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    given = make_parser().parse_args(
        [
            "m",
            "--lora-modules",
            f"a={folders[0]}",
            f'{{"name": "b", "path": "{folders[1]}"}}',
            "--lora-modules",
            f"c={folders[2]}",
        ]
    )
    assert lora_modules(given.lora_modules) == {folder.name: str(folder) for folder in folders}
    for wrong in (
        '{"name": "b"}',
        "{",
        '["a"]',
        '{"name": "b", "path": "p", "rank": 3}',
        "a=",
        "=p",
        "base=/tmp",
        "a=/nowhere/x/y",
    ):
        with pytest.raises(PolylensError):
            lora_modules([wrong])


def test_limits_in_both_forms():
    for form in (["image=3", "video=0"], ["image=3,video=0"], ['{"image": 3, "video": 0}']):
        media = options("--limit-mm-per-prompt", *form).media
        assert (media.max_images, media.max_videos) == (3, 0)


def test_keys_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "keys").write_text("three\n\n four \n")
    monkeypatch.setenv("POLYLENS_API_KEYS", "five,six,")
    monkeypatch.setenv("POLYLENS_ADMIN_API_KEYS", "boss")
    given = options("--api-key", "one", "two", "--api-key-file", str(tmp_path / "keys"))
    assert given.api_keys == ("one", "two", "three", "four", "five", "six")
    assert given.admin_keys == ("boss",)


def test_sampling_defaults():
    assert options("--override-generation-config", '{"temperature": 0, "max_new_tokens": 9}').sampling == {
        "temperature": 0,
        "max_tokens": 9,
    }


def test_a_home_that_nobody_has_is_no_folder():
    with pytest.raises(ModelLoadError, match="~nobody-of-that-name"):
        stated_defaults("~nobody-of-that-name/model")
    with pytest.raises(RequestError, match="--lora-dir: no such folder: ~nobody-of-that-name"):
        folder_named("~nobody-of-that-name/adapters", "--lora-dir")


def test_sampling_defaults_of_a_folder(tmp_path: Path):
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.3, "top_k": 20, "max_new_tokens": 9, "do_sample": true, "eos_token_id": 2}')
    assert stated_defaults(str(tmp_path)) == {"temperature": 0.3, "top_k": 20, "max_tokens": 9}
    assert stated_defaults("none") == stated_defaults("vllm") == {}
    assert stated_defaults("auto") is None
    for content in ("", "[]", '{"top_p": 2}', '{"temperature": "hot"}'):
        file.write_text(content)
        with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
            stated_defaults(str(tmp_path))
    with pytest.raises(ModelLoadError, match="cannot read"):
        stated_defaults(str(tmp_path / "nowhere"))


def test_sampling_defaults_of_the_model(shop: Shop, tmp_path: Path):
    folder = Path(shutil.copytree(shop.model, tmp_path / "model"))
    file = folder / "generation_config.json"
    own = json.loads(file.read_text())
    file.write_text(json.dumps({**own, "temperature": 0.3, "top_p": 0.5, "do_sample": True}))
    assert model_defaults(load(folder, EngineConfig())) == {"temperature": 0.3, "top_p": 0.5}
    file.write_text(json.dumps({**own, "repetition_penalty": 1e-300}))
    with pytest.raises(ModelLoadError, match="repetition_penalty"):
        model_defaults(load(folder, EngineConfig()))


def test_a_chat_template_of_the_operators(shop: Shop, tmp_path: Path):
    """It takes the place of the model's own, and requests may set its variables."""
    template = "{{ mood | default('calm') }}{% for message in messages %}{{ message.content }}{% endfor %}"
    processing = load(shop.model, EngineConfig(), template).processing

    def rendered(**variables: str) -> str:
        messages = [{"role": "user", "content": " hello"}]
        return processing.tokenizer.decode(processing.prepare(messages, chat_template_kwargs=variables).token_ids)

    assert rendered() == "calm hello"
    assert rendered(mood="glad") == "glad hello"
    with pytest.raises(ModelLoadError):
        load(shop.model, EngineConfig(), "{% for")


def test_without_a_model_the_demo_is_served(tmp_path: Path):
    """And flags of vLLM that have no meaning here are taken, each with a line that says why. A signal ends it well."""
    unneeded = ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "64", "--enable-tower-connector-lora"]
    with serving(*unneeded, "--enable-log-requests", "--generation-config", "vllm") as server:
        names = [card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]]
        asked = {"model": names[1], "messages": [{"role": "user", "content": "a word"}], "max_tokens": 2}
        httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60).raise_for_status()
        assert server.terminate() == 0
    assert "finishing running requests" in server.log
    assert names[0] == "polylens-demo"
    assert len(names) == 7
    for flag in ("enable-lora", "max-loras", "max-lora-rank", "enable-tower-connector-lora"):
        assert f"polylens: --{flag}: Not needed: " in server.log
    assert "a word" in server.log  # as --enable-log-requests says


def test_flags_reach_the_engine():
    given = make_parser().parse_args(["m", "--max-num-seqs", "3", "--kv-bytes", "5", "--no-prefix-caching"])
    config = engine_config(given)
    assert (config.max_running, config.kv_bytes, config.prefix_cache) == (3, 5, False)
    assert engine_config(make_parser().parse_args([])).dtype == "float32"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--enable-adapter-loading"],
        ["--enable-adapter-loading", "--adapter-root", "/nowhere"],
        ["--enable-adapter-loading", "--allow-hub", "--api-key", "k"],
        ["--allowed-local-media-path", "/nowhere"],
        ["--allowed-media-domains", "a.example"],
        ["--limit-mm-per-prompt", "audio=1"],
        ["--limit-mm-per-prompt", "image=-1"],
        ["--limit-mm-per-prompt", "{"],
        ["--default-adapter", "image"],
        ["--default-adapter", "audio=x"],
        ["--override-generation-config", '{"temperature": -1}'],
        ["--override-generation-config", '{"speed": 1}'],
        ["--override-generation-config", "[]"],
        ["--api-key", " "],
        ["--api-key-file", "/dev/null"],
        ["--drain-timeout", "-1"],
        ["--drain-timeout", "nan"],
        ["--request-timeout", "0"],
    ],
)
def test_mistakes_are_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("POLYLENS_API_KEYS", raising=False)
    with pytest.raises(PolylensError):
        options(*arguments)


def test_mistakes_get_one_line():
    assert_refused(polylens("serve", "--speed", "9"), "--speed")
    assert_refused(polylens("serve", "--lora-modules", "base=/tmp"), "--lora-modules base=/tmp")
    for host, port in (("127.0.0.1", 99999), ("127.0.0.1", -1), ("no host", 0), ("a" * 70, 0)):
        with pytest.raises(PolylensError, match=f"cannot listen on {host}:{port}"):
            listen(host, port)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert_refused(polylens("serve", "--port", port), port, "use")


def test_help_names_every_flag():
    text = polylens("serve", "--help").stdout
    for _, flags in GROUPS:
        for flag in flags:
            assert f"--{flag.name}" in text
