"""The border of the command: what the process says and exits with when something ends it."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from polylens.cli import main
from polylens.config import EngineConfig
from polylens.errors import MediaError


def exit_code(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """What `polylens run` exits with if loading the model raises `error`."""

    def failing(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("polylens.cli.run.open_llm", failing)
    monkeypatch.setattr(sys, "argv", ["polylens", "run", "m", "--prompt", "x"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def test_wrong_input_is_one_line_and_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert exit_code(monkeypatch, MediaError("picture a.png\n  is empty")) == 2
    assert capsys.readouterr() == ("", "polylens: error: picture a.png is empty\n")


def test_a_failing_disk_is_one_line_and_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert exit_code(monkeypatch, OSError(28, "No space left on device", "out.jsonl")) == 2
    assert "No space left on device: 'out.jsonl'" in capsys.readouterr().err


def test_ctrl_c_is_quiet_and_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert exit_code(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr() == ("", "")


def test_a_bug_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ZeroDivisionError):
        exit_code(monkeypatch, ZeroDivisionError())


MODEL_OPTIONS = ["--dtype", "bfloat16", "--device", "cuda", "--max-model-len", "5", "--kv-bytes", "7"]
MODEL_CONFIG = EngineConfig("bfloat16", "cuda", trust_remote_code=True, max_model_len=5, kv_bytes=7)


@pytest.mark.parametrize(
    ("line", "config"),
    [
        (["run", "m", "--prompt", "x"], EngineConfig()),
        (["run", "m", "--prompt", "x", *MODEL_OPTIONS, "--trust-remote-code"], MODEL_CONFIG),
        (["plan", "m", *MODEL_OPTIONS, "--trust-remote-code"], MODEL_CONFIG),
        (
            ["run", "m", "--prompt", "x", "--no-adapter-processor", "--no-adapter-template"],
            EngineConfig(adapter_processors=False, adapter_templates=False),
        ),
        (
            ["plan", "m", "--vision-cache-bytes", "0", "--adapter-device-bytes", "9"],
            EngineConfig(vision_cache_bytes=0, adapter_device_bytes=9),
        ),
    ],
)
def test_options_of_the_model_reach_the_engine(
    line: list[str], config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading: dict[str, object] = {}

    def load(model: str, adapters: object = None, *, config: EngineConfig) -> None:
        loading.update(model=model, config=config)
        raise MediaError("enough")

    monkeypatch.setattr("polylens.LLM", load, raising=False)
    monkeypatch.setattr(sys, "argv", ["polylens", *line])
    with pytest.raises(SystemExit):
        main.main()
    assert loading == {"model": "m", "config": replace(config, show_progress=sys.stderr.isatty())}
