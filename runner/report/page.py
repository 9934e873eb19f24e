"""Reports: each is one HTML file that loads nothing. Its text is escaped, and its scripts are our own."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from runner.report.comparison import FlippedTask, RunComparison
from runner.report.episode_view import Entry, EpisodeView, Vocabulary, episode_view, token_payload
from runner.report.labels import read_labels
from runner.report.overview import MAX_SHOWN_ITEMS, Overview, overview_of
from runner.report.prices import Price
from runner.report.row_query import agents_of
from runner.store.export import whole_or_nothing
from runner.store.json_values import encode_standard_json
from runner.store.reader import RunFile
from runner.transcript import decoder, printable

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

__all__ = ["ReportSize", "environment", "page_policy", "write_report"]

MAX_EPISODES: Final = 2_000
"""Default maximum number of episodes in a page."""
MAX_PAGE_BYTES: Final = 24_000_000
"""Size after which further episodes have a row, but no transcript."""
CHUNK_EPISODES: Final = 64
"""Number of episodes whose tokens are compressed together."""
MAX_PAIRS: Final = 10
"""Maximum number of flipped tasks whose transcripts are side by side in a comparison."""
MAX_FLIPPED_TASKS: Final = 200
MIN_SHARED_CHARS: Final = 200
"""Shortest system message that a page shows once for all episodes with it."""


@dataclass(frozen=True, slots=True)
class ReportSize:
    """The contents of a written report."""

    episodes: int
    transcripts: int
    """The number of episodes with a transcript."""
    total: int
    """The number of episodes of the run file, without repeated attempts."""
    size: int
    """The size in bytes."""


def write_report(
    run_file: RunFile,
    target: str | Path,
    *,
    most: int = MAX_EPISODES,
    tokens: bool = True,
    comparison: RunComparison | None = None,
    prices: Mapping[str, Price] | None = None,
) -> ReportSize:
    """Write the report of a run file. The page appears under the name `target` once it is complete.

    Args:
        run_file: the run file, which may still be written.
        target: the path of the page.
        most: maximum number of episodes in the page. Failed and extreme episodes are chosen first, then others at equal
            distances.
        tokens: include the ids with their log-probabilities.
        comparison: a comparison of another file, A, with this one.
        prices: the prices of models, for the cost; see `read_prices`.

    Raises:
        StorageFailed: the target cannot be written.
        RunFileError: the run file is damaged.
    """
    overview = overview_of(run_file, prices)
    page = _Page(run_file, overview, comparison, most=most, tokens=tokens)
    with whole_or_nothing(Path(target)) as file:
        for part in page.parts():
            data = part.encode()
            page.size += len(data)
            file.write(data)
    return ReportSize(page.rows, page.transcripts, page.total, page.size)


class _Page:
    """One page while it is written."""

    def __init__(
        self, run_file: RunFile, overview: Overview, comparison: RunComparison | None, *, most: int, tokens: bool
    ) -> None:
        self._run_file = run_file
        self._overview = overview
        self._tokens = tokens
        self._vocabulary = Vocabulary(decoder(run_file.header.engine) if tokens else None)
        self._chunk: list[Any] = []
        self._chunks = 0
        self._shared: dict[str, int] = {}
        self._labels = read_labels(run_file.path)
        self._comparison = comparison
        self.size = self.rows = self.transcripts = 0
        ids = dict.fromkeys(row.id for row in run_file.rows(trained=None))
        self.total = len(ids)
        self._chosen = set(ids) if self.total <= most else self._choose(list(ids), most)

    def _choose(self, ids: Sequence[str], most: int) -> set[str]:
        """The ids of the chosen episodes: episodes that the first screen links to, then others, evenly spaced."""
        flipped = () if self._comparison is None else self._comparison.flipped[:MAX_FLIPPED_TASKS]
        linked = [
            *(task.episodes[1] for task in flipped),
            *(failure.episodes[0] for failure in self._overview.failures[:MAX_SHOWN_ITEMS]),
            *(row.id for _, rows in self._overview.extremes for row in rows),
            *(id for failure in self._overview.failures for id in failure.episodes[: max(1, most // 8)]),
        ]
        chosen = dict.fromkeys(list(dict.fromkeys(linked))[:most])
        rest, left = [id for id in ids if id not in chosen], most - len(chosen)
        return {*chosen, *(rest[number * len(rest) // left] for number in range(left))}

    def parts(self) -> Iterator[str]:
        style, script = asset("report.css"), asset("report.js")
        yield from (
            environment()
            .get_template("report.html.jinja")
            .generate(
                overview=self._overview,
                title=self._overview.title,
                served="",
                link=lambda id: f"#e-{_fragment(id)}" if id in self._chosen else "",
                comparison=self._comparison,
                pairs=self._pairs(),
                max_flipped=MAX_FLIPPED_TASKS,
                style=style,
                script=script,
                policy=page_policy(style, script),
                episodes=self._episodes(),
                blobs=self._last_blobs,
                shared=self._shared,
                tasks=self._task_ids(),
                problems=self._labels.problems,
                total=self.total,
                max_items=MAX_SHOWN_ITEMS,
            )
        )

    def _pairs(self) -> Iterator[tuple[FlippedTask, EpisodeView, EpisodeView]]:
        """The first flipped tasks with an episode of each file, for reading them side by side."""
        if self._comparison is None or not self._comparison.flipped:
            return
        with RunFile(self._comparison.first) as first:
            for task in self._comparison.flipped[:MAX_PAIRS]:
                views = (
                    episode_view(file, agents_of(file, id))
                    for file, id in zip((first, self._run_file), task.episodes, strict=True)
                )
                yield task, next(views), next(views)

    def _task_ids(self) -> list[str]:
        tasks = dict.fromkeys(row.task_id for row in self._run_file.rows(trained=None))
        return list(tasks)[:MAX_EPISODES]

    def _episodes(self) -> Iterator[dict[str, Any]]:
        rows = (row for row in self._run_file.rows(trained=None) if row.id in self._chosen)
        for number, (_, group) in enumerate(groupby(rows, key=lambda row: (row.id, row.attempt))):
            agents = list(group)
            self.rows += 1
            main = next((row for row in agents if row.trained), agents[0])
            view = None
            if self.size < MAX_PAGE_BYTES:
                view = episode_view(self._run_file, agents, self._labels)
                self.transcripts += 1
            yield {"number": number, "row": main, "view": view, **self._place(view), "blob": self._full_chunk()}

    def _place(self, view: EpisodeView | None) -> dict[str, int | None]:
        """The chunk of an episode's tokens, and the episode's index in the chunk; None for both without tokens."""
        if view is None or not self._tokens:
            return {"chunk": None, "index": None}
        payload = [[agent.agent, token_payload(agent.trajectory, self._vocabulary)] for agent in view.agents]
        if not any(part for _, part in payload):
            return {"chunk": None, "index": None}
        self._chunk.append(payload)
        return {"chunk": self._chunks, "index": len(self._chunk) - 1}

    def _full_chunk(self) -> dict[str, Any] | None:
        if len(self._chunk) < CHUNK_EPISODES:
            return None
        blob = {"name": f"tokens-{self._chunks}", "data": packed(self._chunk)}
        self._chunk, self._chunks = [], self._chunks + 1
        return blob

    def _last_blobs(self) -> Iterator[dict[str, str]]:
        if self._chunk:
            yield {"name": f"tokens-{self._chunks}", "data": packed(self._chunk)}
        yield {"name": "vocabulary", "data": packed({str(key): text for key, text in self._vocabulary.texts.items()})}


def packed(value: Any) -> str:
    """JSON, compressed with gzip, as base64, so that no text of a run can end the HTML element around it."""
    return base64.b64encode(gzip.compress(encode_standard_json(value), 9, mtime=0)).decode()


# --- templates


@functools.cache
def asset(name: str) -> str:
    """The text of a file in the templates of `runner.report`."""
    return (resources.files("runner.report") / "templates" / name).read_text(encoding="utf-8")


def page_policy(style: str, script: str, *, served: bool = False) -> str:
    """The Content-Security-Policy of a page: it allows only our style and script, by hash, and images in `data:` URLs.

    A page of the viewer (`served`) may also fetch from the viewer and send it the form of the filters.
    """

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    own = "'self'" if served else "'none'"
    return (
        f"default-src 'none'; style-src {hashed(style)}; script-src {hashed(script)}; img-src data:; "
        f"base-uri 'none'; form-action {own}" + (f"; connect-src {own}" if served else "")
    )


@functools.cache
def environment() -> jinja2.Environment:
    """The Jinja environment of the templates. It escapes texts, and replaces unprintable characters by their codes."""
    import jinja2
    from markupsafe import Markup

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("runner.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
    )
    made.filters |= {
        "figure": figure,
        "count": lambda value: f"{value:,}",
        "percent": _percent,
        "trusted": Markup,
        "fragment": _fragment,
        "content": _content,
    }
    made.globals["shared_text"] = shared_text
    return made


def figure(value: float | None) -> str:
    """A number with three significant digits, or a whole number from 1,000 on; "-" for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _content(text: str) -> Markup:
    """The text escaped for use inside an element.

    Quotes, which are frequent in JSON, stay unescaped, so the result must not be used in attributes.
    """
    from markupsafe import Markup

    return Markup(printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _fragment(name: str) -> str:
    return quote(printable(name))


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def shared_text(entry: Entry, shared: dict[str, int] | None) -> int | None:
    """The number of a long system message among the texts that a page shows once.

    None for another entry, or if `shared` is None.
    """
    if shared is None or entry.kind != "system" or len(entry.text) < MIN_SHARED_CHARS:
        return None
    return shared.setdefault(entry.text, len(shared) + 1)
