"""A server of the pages of run files on loopback: read-only, with a key in the address, also while a run plays."""

from __future__ import annotations

import hmac
import html
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote

from runner.errors import BadOption, DeltarunnerError, RunFileError, StorageFailed
from runner.report.episode_view import Vocabulary, episode_view, token_payload
from runner.report.header_view import model_name
from runner.report.labels import read_labels
from runner.report.overview import MAX_SHOWN_ITEMS, Overview, overview_of
from runner.report.page import asset, environment, page_policy
from runner.report.prices import Price
from runner.report.row_query import ORDERS, PAGE_ROWS, RowQuery, TextSearches, agents_of, neighbours, select_rows
from runner.store.json_values import encode_standard_json
from runner.store.reader import EpisodeRow, RunFile
from runner.transcript import decoder, printable

__all__ = ["Viewer"]

MAX_WAIT_EPISODES: Final = 5_000
"""Maximum number of trajectories of a file for which a page waits for the first results. For a larger file, the page
shows the results later."""
MAX_WAIT_SECONDS: Final = 5.0
MAX_SHARE: Final = 0.01
"""Largest share of the time for answers to pages that follow a run. The computation of results has the same limit."""
MIN_FOLLOW_SECONDS: Final = 2.0
"""Shortest interval between requests of a page for updates."""
MAX_FOLLOW_SECONDS: Final = 600.0
MIN_NOTED_SECONDS: Final = 10.0
"""A page that follows a run shows the interval between its requests if the interval is at least this long."""
MAX_VIEWED_IDS: Final = 1_000_000
"""Maximum number of ids of an episode whose tokens are sent. If there are more, both ends of each segment are sent."""
REQUEST_SECONDS: Final = 30.0
"""The longest wait for a request, after which its connection is closed."""
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})


class RunView:
    """One run file and its results so far."""

    def __init__(self, path: Path, prices: Mapping[str, Price] | None) -> None:
        self.path = path
        self._prices = prices
        self.overview: Overview | None = None
        self.version = 0
        """The number of times that the results were computed."""
        self.problem = ""
        """The reason why the results cannot be computed; "" if they can."""
        self.searches = TextSearches()
        self.seconds: dict[str, float] = {}
        """The processor time of the last answer in seconds, by the name of the page."""
        self._followed_until = 0.0
        self._seen = ""
        self._next = 0.0
        self._lock = threading.Lock()
        self._computing: threading.Thread | None = None

    @staticmethod
    def seen(run_file: RunFile) -> str:
        """A text that changes when the file has new episodes, when the run is complete, and when it has a summary."""
        rows = run_file.select("SELECT (SELECT max(key) FROM episodes), complete, summary IS NULL FROM run")
        return " ".join(map(str, tuple(rows[0])))

    def refresh(self, seen: str, *, wait: float = 0.0) -> None:
        """Compute the results in a thread, if the file has changed and the last computation was long enough ago.

        Args:
            seen: the current state of the file, as the method `seen` returns it.
            wait: maximum number of seconds to wait for the results.
        """
        with self._lock:
            if self._computing is None and seen != self._seen and time.monotonic() >= self._next:
                self._computing = threading.Thread(target=self._compute, args=(seen,), daemon=True)
                self._computing.start()
            thread = self._computing
        if thread is not None and wait:
            thread.join(wait)

    def next_look(self) -> float:
        """The seconds until a page that follows the run may request the status again.

        All pages share the time that following may take, so each of two pages sends half as many requests.
        """
        busy = self.seconds.get("", 0.0) + self.seconds.get("status", 0.0)
        now = time.monotonic()
        with self._lock:
            self._followed_until = max(now, self._followed_until) + busy / MAX_SHARE
            return min(MAX_FOLLOW_SECONDS, max(MIN_FOLLOW_SECONDS, self._followed_until - now))

    def settled(self, seen: str) -> bool:
        """True if the results belong to the current state of the file."""
        return seen == self._seen and self._computing is None

    def _compute(self, seen: str) -> None:
        began = time.monotonic()
        try:
            with RunFile(self.path) as run_file:
                self.overview, self.problem = overview_of(run_file, self._prices), ""
        except DeltarunnerError as error:
            self.problem = str(error)
        except Exception as error:  # the page shows it, and would otherwise wait without end
            self.problem = f"{type(error).__name__}: {error}"
        took = time.monotonic() - began
        with self._lock:
            self.version += 1
            self._seen, self._computing = seen, None
            self._next = time.monotonic() + max(MIN_FOLLOW_SECONDS, took / MAX_SHARE)

    @cached_property
    def decode(self) -> Any:
        """The function that decodes ids of the run's model; None if its vocabulary is not on this machine."""
        with RunFile(self.path) as run_file:
            return decoder(run_file.header.engine)


class Viewer:
    """A server of the pages of run files, on 127.0.0.1.

    Args:
        path: a run file, or a folder with run files.
        port: the port; 0 takes any free one.
        prices: the prices of models, for the cost.

    Raises:
        BadOption: the port is taken, or the folder has no run file.
        RunFileError: the path is not a run file.
    """

    def __init__(self, path: Path, *, port: int = 0, prices: Mapping[str, Price] | None = None) -> None:
        self.folder = path.is_dir()
        self._root = path if self.folder else path.parent
        self._only = None if self.folder else path.name
        self._prices = prices
        self._views: dict[str, RunView] = {}
        if self._only is not None:
            RunFile(path).close()
        elif not self.files():
            raise BadOption(f"{path}: the folder has no run file (*.db): give a run file, or a folder with run files.")
        self.key = secrets.token_urlsafe(18)
        handler = type("Handler", (_Handler,), {"viewer": self})
        try:
            self._server = _ViewerServer(("127.0.0.1", port), handler)
        except (OSError, OverflowError) as error:
            raise BadOption(f"--port {port}: the server cannot listen on this port ({error}): give another.") from error

    @property
    def address(self) -> str:
        """The address with its key."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/{self.key}/"

    def serve(self) -> None:
        """Answer requests until `close` is called in another thread, or the process is interrupted."""
        try:
            self._server.serve_forever()
        finally:
            self._server.server_close()

    def close(self) -> None:
        self._server.shutdown()

    def files(self) -> list[str]:
        """The names of the run files, the newest first."""
        if self._only is not None:
            return [self._only]
        found = [(each.stat().st_mtime, each.name) for each in self._root.glob("*.db") if each.is_file()]
        return [name for _, name in sorted(found, reverse=True) if not name.startswith(".")]

    def view(self, name: str) -> RunView | None:
        """The view of a file; None if the viewer has no file of this name."""
        if name not in self.files():
            return None
        return self._views.setdefault(name, RunView(self._root / name, self._prices))

    # --- pages

    def folder_page(self) -> str:
        """The page with all files."""
        return _page(
            "view_folder.html.jinja", title=f"Run files in {self._root}", files=map(self._listed, self.files())
        )

    def _listed(self, name: str) -> dict[str, object]:
        try:
            with RunFile(self._root / name) as run_file:
                header = run_file.header
                return {
                    "name": name,
                    "environment": header.environment,
                    "model": model_name(header),
                    "episodes": f"{sum(run_file.outcomes().values()):,}",
                    "begun": f"{header.created:%Y-%m-%d %H:%M}",
                    "state": "complete" if run_file.complete else "not complete",
                    "problem": "",
                }
        except DeltarunnerError as error:
            empty = dict.fromkeys(("environment", "model", "episodes", "begun", "state"), "")
            return {"name": name, **empty, "problem": str(error)}

    def run_page(self, view: RunView, given: Mapping[str, str]) -> str:
        """The page of a run: its results and a list of episodes."""
        query = RowQuery.of(given)
        first = _whole(given.get("from", "0"), "from")
        with RunFile(view.path) as run_file:
            seen = view.seen(run_file)
            large = run_file.select("SELECT count(*) FROM episodes")[0][0] > MAX_WAIT_EPISODES
            view.refresh(seen, wait=0.0 if view.overview or large else MAX_WAIT_SECONDS)
            labels = read_labels(view.path)
            found = view.searches.keys(run_file, query.find, labels) if query.find else None
            rows, total = select_rows(run_file, query, found, first=first)
            header = run_file.header
            return _page(
                "view.html.jinja",
                title=f"{header.environment} on {model_name(header)}",
                served=seen,
                folder=self.folder,
                state_words=_state(run_file),
                version=view.version,
                overview=view.overview,
                problem=view.problem,
                mean=run_file.select("SELECT avg(reward) FROM trajectories")[0][0],
                outcomes={each.value: count for each, count in run_file.outcomes().items()},
                query=query,
                problems=labels.problems,
                orders=ORDERS,
                page=_pages(query, rows, first, total),
            )

    @staticmethod
    def overview_part(view: RunView) -> str:
        """The results of a run, as a part of its page."""
        if view.overview is None:
            words = html.escape(printable(view.problem) or "The results are being computed.")
            return f'<section id="results"><h2>Results</h2><p class="warn">{words}</p></section>'
        sections: Any = environment().get_template("overview.jinja").module
        first = sections.results(view.overview, MAX_SHOWN_ITEMS)
        return f"{first}{sections.look_and_run(view.overview, MAX_SHOWN_ITEMS, _link)}"

    @staticmethod
    def status(view: RunView) -> dict[str, object]:
        """The state of a run, for a page that follows it."""
        with RunFile(view.path) as run_file:
            seen = view.seen(run_file)
            view.refresh(seen)
            settled = run_file.complete and view.settled(seen)
            wait = view.next_look()
            words = _state(run_file)
            if not run_file.complete and wait >= MIN_NOTED_SECONDS:
                words += f" The page looks again in {wait:.0f} s, as the file is large."
        return {"seen": seen, "version": view.version, "settled": settled, "words": words, "wait": wait}

    @staticmethod
    def episode_page(view: RunView, given: Mapping[str, str]) -> str:
        """The page of an episode, or only its transcript."""
        with RunFile(view.path) as run_file:
            rows = agents_of(run_file, given.get("id", ""))
            made = episode_view(run_file, rows, read_labels(view.path))
            if given.get("part") == "body":
                parts: Any = environment().get_template("parts.jinja").module
                return str(parts.episode_body(made, None))
            before, after = neighbours(run_file, rows[0])
            return _page(
                "view_episode.html.jinja", title=rows[0].id, row=rows[0], view=made, before=before, after=after
            )

    @staticmethod
    def tokens(view: RunView, given: Mapping[str, str]) -> dict[str, object]:
        """The tokens of an episode, with the texts of their ids."""
        vocabulary = Vocabulary(view.decode)
        with RunFile(view.path) as run_file:
            rows = agents_of(run_file, given.get("id", ""))
            agents = [
                [row.agent, token_payload(run_file.trajectory(row), vocabulary, most=MAX_VIEWED_IDS)] for row in rows
            ]
        return {"agents": agents, "vocabulary": {str(key): text for key, text in vocabulary.texts.items()}}


def _link(id: str, part: str = "episode") -> str:
    """The relative address of an episode. Its id is quoted as bytes, since it may contain half a surrogate pair."""
    return f"{part}?id={quote(id.encode('utf-8', 'surrogatepass'), safe='')}"


def _page(template: str, **values: Any) -> str:
    style, script = asset("report.css"), asset("report.js")
    policy = page_policy(style, script, served=True)
    given = {"style": style, "script": script, "policy": policy, "served": "page", "link": _link, **values}
    return environment().get_template(template).render(max_items=MAX_SHOWN_ITEMS, **given)


def _state(run_file: RunFile) -> str:
    count = int(run_file.select("SELECT count(*) FROM episodes WHERE NOT superseded")[0][0])
    words = f"{count:,} trajectories"
    if run_file.complete:
        return f"{words}, complete."
    return f"{words} so far. The run is not complete; this page follows it."


def _pages(query: RowQuery, rows: list[EpisodeRow], first: int, total: int) -> dict[str, object]:
    last = first + len(rows)
    before, after = max(0, first - PAGE_ROWS), last
    return {
        "rows": rows,
        "words": f"{first + 1:,} to {last:,} of {total:,} episodes" if rows else _no_rows(query, total),
        "address": f"?{query.address(**{'from': first or ''})}",
        "before": f"?{query.address(**{'from': before or ''})}#episodes" if first else "",
        "after": f"?{query.address(**{'from': after})}#episodes" if last < total else "",
    }


def _no_rows(query: RowQuery, total: int) -> str:
    """Return why a page lists no episodes."""
    if total:
        return "No further episodes."  # the address begins after the last episode
    return "No episodes." if query == RowQuery(sort=query.sort) else "No episode matches the filters."


def _whole(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise BadOption(f"{name}={text!r:.60}: give a whole number.")
    return int(text)


# --- HTTP


class _ViewerServer(ThreadingHTTPServer):
    """A server whose threads do not keep the process alive."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Print nothing, since this error means that the browser closed the connection during an answer."""


class _Handler(BaseHTTPRequestHandler):
    """The handler of GET and HEAD requests that have the key."""

    viewer: Viewer
    protocol_version = "HTTP/1.1"
    server_version = "deltarunner"
    sys_version = ""
    timeout = REQUEST_SECONDS

    def log_message(self, *_: object) -> None:
        """Print nothing, since one line per request would scroll the viewer's address away."""

    def _read(self) -> None:
        try:
            if self._is_allowed():
                self._answer(self.path)
        except BadOption as error:
            self._message(HTTPStatus.BAD_REQUEST, str(error))
        except DeltarunnerError as error:
            damaged = isinstance(error, StorageFailed) or not isinstance(error, RunFileError)
            status = HTTPStatus.INTERNAL_SERVER_ERROR if damaged else HTTPStatus.NOT_FOUND
            self._message(status, str(error))
        except OSError:
            self.close_connection = True  # the browser has closed the connection
        except Exception as error:  # if one page cannot be shown, other pages must still work
            text = f"A bug in the viewer, please report it: {type(error).__name__}: {error}"
            self._message(HTTPStatus.INTERNAL_SERVER_ERROR, text)

    def _is_allowed(self) -> bool:
        """Return True if a request has a loopback host and the key; otherwise answer it with an error."""
        host = self.headers.get("Host", "")
        if host not in _LOOPBACK and host.rpartition(":")[0] not in _LOOPBACK:
            # With DNS rebinding, the name of another site leads to this server. The request then has that name as host.
            self._message(HTTPStatus.MISDIRECTED_REQUEST, "The host of the address must be 127.0.0.1 or localhost.")
            return False
        given = self.path.removeprefix("/").partition("/")[0]
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.viewer.key.encode()):
            words = "The address has no key, or an old key: open the address that `deltarunner view` prints."
            self._message(HTTPStatus.NOT_FOUND, words)
            return False
        return True

    def _refuse(self) -> None:
        self.close_connection = True  # the body of the request is not read
        words = f"The viewer does not answer {self.command:.20}, since it only reads: send GET or HEAD."
        self._message(HTTPStatus.METHOD_NOT_ALLOWED, words, Allow="GET, HEAD")

    def _answer(self, target: str) -> None:
        path, _, query = target.partition("?")
        parts = path.split("/")[2:]
        viewer = self.viewer
        if parts in ([], [""]) and not viewer.folder:
            self._send(HTTPStatus.FOUND, b"", Location=f"/{viewer.key}/{quote(viewer.files()[0])}/")
            return
        if parts in ([], [""]):
            self._html(viewer.folder_page())
            return
        view = viewer.view(unquote(parts[0]))
        page = parts[1] if len(parts) == 2 else "no page"
        if view is None or page not in _PAGES:
            words = f"There is no page {'/'.join(parts)[:80]!r} here: open the address that `deltarunner view` prints."
            self._message(HTTPStatus.NOT_FOUND, words)
            return
        try:
            given = dict(parse_qsl(query, errors="surrogatepass"))
        except UnicodeDecodeError:
            self._message(HTTPStatus.BAD_REQUEST, "The address is not UTF-8.")
            return
        began = time.thread_time()
        made = _PAGES[page](viewer, view, given)
        view.seconds[page] = time.thread_time() - began
        if isinstance(made, str):
            self._html(made)
        else:
            self._send(HTTPStatus.OK, encode_standard_json(made), "application/json")

    def _html(self, text: str, status: HTTPStatus = HTTPStatus.OK, **headers: str) -> None:
        self._send(status, text.encode("utf-8", "replace"), "text/html; charset=utf-8", **headers)

    def _message(self, status: HTTPStatus, text: str, **headers: str) -> None:
        self._html(_page("view_message.html.jinja", title=text), status, **headers)

    def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain", **headers: str) -> None:
        self.send_response(status)
        fixed = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": page_policy(asset("report.css"), asset("report.js"), served=True)
            + "; frame-ancestors 'none'",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in {**fixed, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


for _method in ("GET", "HEAD"):
    setattr(_Handler, f"do_{_method}", _Handler._read)
for _method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
    setattr(_Handler, f"do_{_method}", _Handler._refuse)

_PAGES: Final[Mapping[str, Callable[[Viewer, RunView, Mapping[str, str]], str | dict[str, object]]]] = {
    "": Viewer.run_page,
    "overview": lambda _, view, __: Viewer.overview_part(view),
    "status": lambda _, view, __: Viewer.status(view),
    "episode": lambda _, view, given: Viewer.episode_page(view, given),
    "tokens": lambda _, view, given: Viewer.tokens(view, given),
}
