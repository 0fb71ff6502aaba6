"""`polylens batch`."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from polylens import LLM, SamplingParams
from polylens.cli.batch_file import read_lines
from polylens.cli.batch_journal import Journal
from polylens.cli.batch_run import answer_lines
from tests.cli.conftest import Shop
from tests.cli.process import assert_refused, polylens, started


def line(custom_id: str, model: str, content: Any, **body: Any) -> str:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"custom_id": custom_id, "body": {"model": model, "messages": messages, "max_tokens": 6, **body}})


def with_picture(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]


def batch(shop: Shop, tmp_path: Path, lines: list[str]):
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    done = polylens("batch", shop.model, *shop.adapters, "--input", "in.jsonl", "--output", "out.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done, [json.loads(raw) for raw in (tmp_path / "out.jsonl").read_text().splitlines()]


def text_of(shop: Shop, model: str) -> str:
    content = [{"type": "image", "image": shop.image}, {"type": "text", "text": "What?"}]
    adapters = {} if model == "base" else {model: shop.folder / model}
    with LLM(shop.model, adapters=adapters) as llm:
        return llm.chat([{"role": "user", "content": content}], *adapters, sampling=SamplingParams(max_tokens=6)).text


def test_good_lines_are_answered_and_bad_ones_get_an_error_each(shop: Shop, tmp_path: Path):
    data = "data:image/png;base64," + base64.b64encode(shop.image.read_bytes()).decode()
    (tmp_path / "local.png").write_bytes(shop.image.read_bytes())
    lines = [
        line("eyes-data", "eyes", with_picture(data)),
        line("eyes-file", "eyes", with_picture("local.png")),
        line("base", "base", with_picture("local.png"), logprobs=True, top_logprobs=2),
        "not json",
        line("words", "words", "hi"),
        line("no-picture", "eyes", with_picture("none.png")),
        line("web", "eyes", with_picture("https://example.org/a.png")),
        line("nobody", "nobody", "hi"),
        line("n", "words", "hi", n=2, temperature=2.0, seed=1),
        line("form", "eyes", with_picture("local.png"), guided_choice=["left", "right"], repetition_penalty=1.5),
        line("wrong", "words", "hi", n=0),
        json.dumps(
            {
                "custom_id": "plain",
                "url": "/v1/completions",
                "body": {"model": "words", "prompt": ["a", "b"], "max_tokens": 3},
            }
        ),
    ]
    done, answers = batch(shop, tmp_path, lines)
    assert done.stdout == ""
    assert "7 of 12 requests answered" in done.stderr
    ids = [
        "eyes-data",
        "eyes-file",
        "base",
        None,
        "words",
        "no-picture",
        "web",
        "nobody",
        "n",
        "form",
        "wrong",
        "plain",
    ]
    assert [answer["custom_id"] for answer in answers] == ids
    statuses = [answer["response"]["status_code"] for answer in answers]
    assert statuses == [200, 200, 200, 400, 200, 400, 400, 404, 200, 200, 400, 200]
    assert [answer["error"] is None for answer in answers] == [status == 200 for status in statuses]
    texts = [answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers[:3]]
    assert texts == [text_of(shop, model) for model in ("eyes", "eyes", "base")]
    logprobs = answers[2]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert len(logprobs) == answers[2]["response"]["body"]["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    assert "none.png" in answers[5]["error"]["message"]
    assert [choice["index"] for choice in answers[8]["response"]["body"]["choices"]] == [0, 1]
    assert answers[9]["response"]["body"]["choices"][0]["message"]["content"] in ("left", "right")
    assert answers[10]["error"]["param"] == "n"
    assert [choice["index"] for choice in answers[11]["response"]["body"]["choices"]] == [0, 1]
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_a_wrong_adapter_stops_everything(shop: Shop, tmp_path: Path):
    (tmp_path / "in.jsonl").write_text(line("a", "base", "hi"))
    (tmp_path / "empty").mkdir()
    done = polylens("batch", shop.model, "--adapter", "empty", "--input", "in.jsonl", "--output", "o", cwd=tmp_path)
    assert_refused(done, "adapter_config.json")
    assert not (tmp_path / "o").exists()


def written_lines(*numbers: int) -> list[str]:
    """Requests of different lengths, so that they end one after the other."""
    return [line(f"r{number}", "words", f"hi {number}", max_tokens=number, ignore_eos=True) for number in numbers]


def test_answers_that_came_before_an_end_are_gone_on_from(shop: Shop, tmp_path: Path):
    class Crash(Exception):
        pass

    class Dying(Journal):
        def add(self, raw: str, output_line: str) -> None:
            if len(self) == 3:
                raise Crash
            super().add(raw, output_line)

    (tmp_path / "in.jsonl").write_text("\n".join(written_lines(2, 9, 4, 30, 6, 20, 8)))
    lines = read_lines(tmp_path / "in.jsonl")
    counted: list[int] = []

    def answer(kind: type[Journal], *, resume: bool) -> tuple[list[str], int]:
        """The output lines, and how many tokens were generated for them."""
        with LLM(shop.model, {"words": shop.words}) as llm, kind(tmp_path / "j", {}, resume=resume) as journal:
            written = answer_lines(llm, "m", lines, tmp_path, journal, lambda: counted.append(1))
            return written, llm.engine.num_generated_tokens

    with pytest.raises(Crash):
        answer(Dying, resume=False)
    kept = [json.loads(raw)["output"] for raw in (tmp_path / "j").read_text().splitlines()[1:]]
    assert [json.loads(raw)["custom_id"] for raw in kept] == ["r2", "r4", "r6"]
    counted.clear()
    written, num_tokens = answer(Journal, resume=True)
    assert [json.loads(raw)["custom_id"] for raw in written] == ["r2", "r9", "r4", "r30", "r6", "r20", "r8"]
    assert set(kept) <= set(written)
    assert num_tokens == 9 + 30 + 20 + 8
    assert len(counted) == 7


@pytest.mark.full
def test_a_killed_run_loses_no_answer(shop: Shop, tmp_path: Path):
    """The second run takes over what the first one had answered, word for word, and does only the rest."""
    (tmp_path / "in.jsonl").write_text("\n".join(written_lines(*range(1, 150))))
    arguments = ["batch", shop.model, *shop.adapters, "--input", "in.jsonl", "--output", "out.jsonl"]
    partial = tmp_path / "out.jsonl.partial"
    with started(*arguments, cwd=tmp_path) as process:
        while not (partial.exists() and partial.read_bytes().count(b"\n") > 3):
            assert process.poll() is None, "it ended before it could be killed"
        process.kill()
    records = partial.read_text().splitlines(keepends=True)[1:]
    kept = [json.loads(raw)["output"] for raw in records if raw.endswith("\n")]
    assert 0 < len(kept) < 149
    assert_refused(polylens(*arguments, cwd=tmp_path), "--resume")
    done = polylens(*arguments, "--resume", cwd=tmp_path)
    assert "149 of 149 requests answered" in done.stderr
    written = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(raw)["custom_id"] for raw in written] == [f"r{number}" for number in range(1, 150)]
    assert set(kept) <= set(written)
    assert not partial.exists()
