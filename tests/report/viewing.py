"""A viewer in a thread, and its answers."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runner.report.viewer import Viewer


@contextmanager
def viewing(path: Path) -> Iterator[Viewer]:
    viewer = Viewer(path)
    thread = threading.Thread(target=viewer.serve)
    thread.start()
    try:
        yield viewer
    finally:
        viewer.close()
        thread.join()


class Answer:
    """An answer of a viewer."""

    def __init__(
        self, viewer: Viewer, path: str, *, method: str = "GET", key: str | None = None, host: str = ""
    ) -> None:
        address = urlsplit(viewer.address)
        assert address.hostname is not None
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        connection.putrequest(method, f"/{viewer.key if key is None else key}/{path}", skip_host=True)
        connection.putheader("Host", host or address.netloc)
        connection.endheaders()
        response = connection.getresponse()
        self.status, self.headers = response.status, response.headers
        self.text = response.read().decode()
        connection.close()

    def json(self) -> Any:
        return json.loads(self.text)
