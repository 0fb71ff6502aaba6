"""The page in a real browser (headless Chromium), against a server whose engine is the tests' own."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polylens.server.options import ServerOptions
from tests.server.conftest import Serve
from tests.server.local import Local
from tests.server.media import PICTURE, QUESTION, ask

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright here: pip install playwright")

MODELS = ("tiny", "eyes", "words")


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: sync_api.Browser) -> Iterator[sync_api.Page]:
    """A page that fails the test when its script does, or when it asks another host for anything."""
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if "//127.0.0.1" not in request.url[:20] else None)
    yield page
    page.close()
    assert [problem for problem in problems if not problem.startswith(("data:", "blob:"))] == []


@pytest.fixture
def picture_file(tmp_path: Path) -> Path:
    PICTURE.save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def until(page: sync_api.Page, expression: str) -> None:
    """Wait for a script's expression; Playwright's own way would need `eval`, which the page's policy forbids."""
    deadline = time.monotonic() + 30
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


def answer_of(server: Local, model: str) -> str:
    from tests.server.media import png_url

    asked = {"model": model, "messages": ask(QUESTION, png_url(PICTURE)), "temperature": 0, "max_tokens": 8}
    return server.http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]


def shown_answers(page: sync_api.Page) -> dict[str, str]:
    page.wait_for_selector("article")
    until(page, "[...document.querySelectorAll('article')].every((one) => one.dataset.state)")
    cards = page.locator("article").all()
    return {card.locator("h3").inner_text(): card.locator(".text").text_content() or "" for card in cards}


def test_several_adapters_answer_side_by_side(page: sync_api.Page, serve: Serve, picture_file: Path):
    server = serve(ServerOptions(("tiny",)))
    page.goto(server.url)
    page.wait_for_selector("#models input")
    page.set_input_files("#picture", picture_file)
    page.fill("#prompt", QUESTION)
    page.fill("#max-tokens", "8")
    for box in page.locator("#models input").all():
        box.check()
    page.click("#run")
    assert shown_answers(page) == {name: answer_of(server, name) for name in MODELS}
    for times in page.locator("article .times").all_inner_texts():
        assert re.fullmatch(r"first token \d+ ms( · [\d.]+ tokens/s)? · \d+ tokens", times), times
    until(page, "document.querySelector('#vision').textContent.includes('%')")
    assert page.locator("#adapters tr").count() == 2
    until(page, "document.querySelector('#running').textContent === '0'")


def test_the_keyboard_is_enough(page: sync_api.Page, serve: Serve):
    page.goto(serve(ServerOptions(("tiny",))).url)
    page.wait_for_selector("#models input")
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.value"))
        # The file input is as large as the drop zone around it, which has the outline.
        outlined = "document.activeElement.closest('#drop') ?? document.activeElement"
        shown = page.evaluate(f"getComputedStyle({outlined}).outlineStyle")
        assert shown != "none" or reached[-1] is None  # None: past the last one
    for name in ("picture", "prompt", "max-tokens", "temperature", "tiny", "eyes", "words", "run"):
        assert name in reached
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("what is in the picture?")
    page.keyboard.press("Control+Enter")
    assert len(shown_answers(page)) == 3


def test_escape_stops_and_frees(page: sync_api.Page, serve: Serve):
    server = serve(ServerOptions(("tiny",)))
    page.goto(server.url)
    page.wait_for_selector("#models input")
    page.fill("#max-tokens", "450")
    page.fill("#prompt", QUESTION)
    page.evaluate("document.querySelectorAll('#models input').forEach((box, i) => { box.checked = i === 0; })")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("article")
    page.keyboard.press("Escape")
    until(page, "document.querySelector('article').dataset.state")
    server.settle()


def test_a_key_is_asked_for_and_kept_in_the_tab(page: sync_api.Page, serve: Serve, browser: sync_api.Browser):
    url = serve(ServerOptions(("tiny",), api_keys=("secret",))).url
    page.goto(url)
    page.wait_for_selector("#key-form:not([hidden])")
    assert page.locator("#models input").count() == 0
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#key-note').textContent.includes('not accepted')")
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    page.wait_for_selector("#models input")
    page.reload()
    page.wait_for_selector("#models input")
    assert not page.is_visible("#key-form")
    other = browser.new_page()
    other.goto(url)
    other.wait_for_selector("#key-form:not([hidden])")
    other.close()


def test_answers_are_text_not_html(page: sync_api.Page, serve: Serve):
    page.goto(serve(ServerOptions(("tiny",))).url)
    page.wait_for_selector("#models input")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        content_type="text/event-stream",
        body='data: {"choices": [{"delta": {"content": "<img src=x onerror=alert(1)>"}}]}\n\ndata: [DONE]\n\n',
    ))  # fmt: skip
    page.click("#run")
    assert set(shown_answers(page).values()) == {"<img src=x onerror=alert(1)>"}
    assert page.locator("article img").count() == 0


def test_errors_are_shown(page: sync_api.Page, serve: Serve):
    page.goto(serve(ServerOptions(("tiny",))).url)
    page.wait_for_selector("#models input")
    page.evaluate("document.querySelectorAll('#models input').forEach((box) => { box.checked = false; })")
    page.click("#run")
    assert "Tick" in page.locator("#note").inner_text()
    page.evaluate("Object.assign(document.querySelector('#models input'), { value: 'nobody', checked: true })")
    page.click("#run")
    page.wait_for_selector("article[data-state=failed]")
    assert "does not exist" in page.locator("article .times").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_colour_schemes(page: sync_api.Page, serve: Serve, scheme: str):
    """WCAG AA: contrast of at least 4.5."""
    page.emulate_media(color_scheme=scheme)
    page.goto(serve(ServerOptions(("tiny",))).url)
    page.wait_for_selector("#models input")
    for selector in ("body", "dt", "label", "#drop-note", "#run", "h1 small"):
        assert page.evaluate(CONTRAST, selector) >= 4.5, selector
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


CONTRAST = """
(selector) => {
  const element = document.querySelector(selector);
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let behind = element;
  while (rgb(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map((c) => light(rgb(c)));
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}
"""
