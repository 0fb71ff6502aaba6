"""The command line of `polylens serve`: flags, files of keys, and mistakes that are said before anything loads."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from polylens.cli.serve import engine_config, lora_modules, server_options
from polylens.cli.serve_flags import GROUPS, make_parser, with_flags
from polylens.errors import PolylensError
from polylens.server.options import ServerOptions
from tests.cli.process import assert_refused, polylens

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
    source = (ROOT / "src/polylens/cli/serve.py").read_text()
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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert_refused(polylens("serve", "--port", port), port, "use")


def test_help_names_every_flag():
    text = polylens("serve", "--help").stdout
    for _, flags in GROUPS:
        for flag in flags:
            assert f"--{flag.name}" in text
