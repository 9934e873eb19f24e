"""Makes the pictures of the pages: `python -m tests.report.screenshots [RUN.db]`, or `make screenshots`.

Without a run file it plays 64 episodes of the demo. It needs Chromium.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio

from runner import RunFile
from runner.report.page import write_report
from tests.report.browser import Page, browser
from tests.repository import DOCS

FOLDER = DOCS / "images"
MAX_BYTES = 150_000


async def take(tab: Page, name: str) -> None:
    """Write the visible part of the page as a picture."""
    data = base64.b64decode((await tab.send("Page.captureScreenshot", format="png"))["data"])
    assert len(data) <= MAX_BYTES, f"{name} has {len(data):,} bytes"
    (FOLDER / f"{name}.png").write_bytes(data)
    print(f"{FOLDER / name}.png: {len(data):,} bytes")


async def take_all(page: Path, folder: Path) -> None:
    FOLDER.mkdir(exist_ok=True)
    async with browser(folder / "light") as tab:
        await tab.open(page, width=1180)
        await tab.until("document.documentElement.dataset.ready")
        await take(tab, "report")
    async with browser(folder / "dark") as tab:
        await tab.open(page, width=1180, dark=True)
        await tab.until("document.documentElement.dataset.ready")
        await tab.value("document.querySelector('details.e[data-chunk]').open = true")
        await tab.until("document.querySelector('.show-tokens')")
        await tab.value("document.querySelector('.show-tokens').click()")
        await tab.until("document.querySelectorAll('.tokens i.sampled').length > 5")
        await tab.value("document.querySelectorAll('.tokens i.sampled')[5].click()")
        await tab.value("document.querySelector('details.e[open] .show-tokens').scrollIntoView()")
        await take(tab, "tokens")


def main(given: list[str]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        file = Path(given[0]) if given else folder / "demo.db"
        if not given:
            command = [
                "run",
                "calculator",
                "--episodes",
                "64",
                "--group-size",
                "4",
                "--logprobs",
                "3",
                "--file",
                str(file),
            ]
            subprocess.run([sys.executable, "-m", "runner.cli.app", *command], check=True)
        with RunFile(file) as run_file:
            write_report(run_file, folder / "report.html")
        anyio.run(take_all, folder / "report.html", folder)


if __name__ == "__main__":
    main(sys.argv[1:])
