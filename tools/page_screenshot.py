"""Take the picture of the server's page that docs/serving.md shows: `python tools/page_screenshot.py`.

Serves the demo model with its adapters, asks several of them about one held-out picture in headless Chromium, and
saves what the page then looks like.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from polylens.demo.data import PROMPT, heldout

OUTPUT = Path("docs/serving-page.png")
SIZE = {"width": 1240, "height": 760}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domain", default="handwritten")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("serve", nargs="*", help="arguments of `polylens serve`, after --; none: the demo")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "polylens", "serve", *arguments.serve, "--port", "0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        try:
            assert server.stdout is not None
            found = re.search(r"at (http://\S+)", server.stdout.readline())
            if found is None:
                sys.exit("the server did not start")
            picture = Path(folder) / "picture.png"
            heldout(arguments.domain)[0][0].save(picture)
            take(found[1], picture, arguments.output, dark=arguments.dark)
        finally:
            server.terminate()


def take(url: str, picture: Path, output: Path, *, dark: bool) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="dark" if dark else "light")  # type: ignore[arg-type]
        page.goto(url)
        page.wait_for_selector("#models input")
        page.set_input_files("#picture", picture)
        page.fill("#prompt", PROMPT)
        for box in page.locator("#models input").all()[:5]:
            box.check()
        page.click("#run")
        page.wait_for_selector("article[data-state]")
        while not page.evaluate("[...document.querySelectorAll('article')].every((one) => one.dataset.state)"):
            page.wait_for_timeout(50)
        page.wait_for_timeout(1500)  # the numbers of the server come once a second
        page.screenshot(path=output)
        browser.close()


if __name__ == "__main__":
    main()
