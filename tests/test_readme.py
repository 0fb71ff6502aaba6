"""The README says what is true: its Python runs, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.families.adapters import make_adapter
from tests.families.build import build_checkpoint
from tests.families.media import picture

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"


def test_it_opens_with_the_two_commands():
    block = README.split("```")[1].splitlines()
    assert [line.split("#")[0].strip() for line in block[1:3]] == ["make demo", "make test"]


@pytest.mark.parametrize("document", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]), ids=lambda file: file.name)
def test_links_lead_to_files(document: Path):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    model = build_checkpoint("qwen2_5_vl", tmp_path / "model")
    for seed, name in enumerate(["gauge-lora", "xray-lora", "gauge-lora-2"]):
        make_adapter(model, tmp_path / name, targets="all", seed=seed)
    for seed, name in enumerate(["dial.jpg", "chest.png", "cat.jpg"]):
        picture(64, 56, seed).save(tmp_path / name)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    # The tiny model answers with noise that need not end: keep it short.
    code = code.replace(MODEL, str(model)).replace("llm = LLM(", "llm = LLM(max_model_len=128, model=")
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), space)
    assert len(space["answers"]) == 3  # type: ignore[arg-type]
    assert capsys.readouterr().out
