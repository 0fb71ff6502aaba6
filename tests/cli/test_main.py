"""The border of the command: what the process says and exits with when something ends it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from polylens.cli import main, options
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


def test_all_shared_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, object] = {}

    class Told:
        """Stands in for the LLM. Its adapters bring no processing of their own."""

        def __init__(self, model: str, **given: object) -> None:
            seen.update(model=model, **given)
            self.registry = SimpleNamespace(report=lambda name: SimpleNamespace(processing=()))

    monkeypatch.setattr("polylens.LLM", Told, raising=False)
    given = options.ModelOptions("m", options.DType.BFLOAT16, "cuda", 5, 7, trust_remote_code=True)
    options.open_llm(given, {"a": "b"})
    config = EngineConfig(
        dtype="bfloat16",
        device="cuda",
        max_model_len=5,
        kv_bytes=7,
        trust_remote_code=True,
        show_progress=sys.stderr.isatty(),
    )
    assert seen == {"model": "m", "adapters": {"a": "b"}, "config": config}
    options.open_llm(options.ModelOptions("m"), {})
    assert seen["config"] == EngineConfig(show_progress=sys.stderr.isatty())
