"""A page in a real Chromium without a display, controlled by the DevTools protocol."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest

Test = TypeVar("Test", bound=Callable[..., Any])

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
browser_sample = pytest.mark.sample_units("browser", 3)
"""Chromium takes a second or more to start, so `make test` plays a third of these tests, and `--sweeps=whole` all."""
_IS_THERE = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt install chromium)")


def needs_browser(test: Test) -> Test:
    """Skip the test without Chromium, and on trio, since the DevTools client needs asyncio."""
    marked: Test = pytest.mark.asyncio_alone(_IS_THERE(test))
    return marked


class Page:
    """A tab of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.events: list[dict[str, Any]] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    async def open(self, file: Path | str, *, width: int = 1180, dark: bool = False, script: bool = True) -> None:
        self.events.clear()
        await self.send("Page.enable")
        await self.send("Network.enable")
        await self.send("Runtime.enable")
        await self.send("Log.enable")
        await self.send("Emulation.setScriptExecutionDisabled", value=not script)
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        await self.send("Page.navigate", url=file if isinstance(file, str) else file.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(await self._socket.receive_json(timeout=60))

    async def value(self, expression: str) -> Any:
        result = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        # While another page is loaded, it may have no body.
        attempt = f"(() => {{ try {{ return !!({expression}) }} catch {{ return false }} }})()"
        for _ in range(200):
            if value := await self.value(attempt):
                return value
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {expression}")

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            text |= {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            codes = {"Enter": 13, "Tab": 9, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
            await self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes.get(key, 0), **text
            )

    async def click(self, selector: str) -> None:
        place = (
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}}); "
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        box = [0, 0]
        for _ in range(50):
            before, box = box, await self.value(place)
            if box == before:  # else rows that scrolled into view have changed the layout
                break
            await asyncio.sleep(0.1)
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    @property
    def requests(self) -> list[str]:
        """Return the addresses that the page requested, apart from its own."""
        asked = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in asked[1:] if not url.startswith("data:")]

    @property
    def complaints(self) -> list[str]:
        """Return exceptions of scripts, and requests that the policy of the page refused."""
        return [
            str(event["params"])
            for event in self.events
            if event.get("method") in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening")
            or (event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error")
        ]


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """Yield a new Chromium with one tab."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
        *(f"--user-data-dir={folder}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port = folder / "DevToolsActivePort"
        for _ in range(600):
            if port.is_file() and len(port.read_text().splitlines()) == 2:
                break
            await asyncio.sleep(0.05)
        address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json/list"
        async with aiohttp.ClientSession() as session:
            async with session.get(address) as response:
                tabs = await response.json()
            tab = next(each for each in tabs if each["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=2**28) as socket:
                yield Page(socket)
                await socket.send_json({"id": 0, "method": "Browser.close"})
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
