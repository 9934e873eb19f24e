"""Probing of a chat template in a separate process, since a template may loop for ever, or exhaust the memory.

`python -m runner.template_probe` is that process. It reads one JSON document, and writes lines of JSON. The last line
is the answer; the others report progress.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import runner.errors
from runner.errors import DeltarunnerError
from runner.messages import canonical_json
from runner.parsing.format_cache import cache_format
from runner.parsing.learning.learnt_format import LearntFormat, learn_format
from runner.tokens.probing.profile import TemplateProfile
from runner.tokens.probing.traits import profile_of
from runner.tokens.probing.usable import TemplateFault, UnusableTemplate, usable_renderer
from runner.tokens.shown_arguments import ALL_SORTS, unseen_arguments
from runner.tokens.template import ChatTemplate
from runner.tokens.template import _bundled as bundled_templates

__all__ = [
    "MEMORY_BYTES",
    "PROBE_SECONDS",
    "TemplateFault",
    "UnusableTemplate",
    "bundled_templates",
    "in_process",
    "is_bundled",
    "probe",
    "request_of",
]

PROBE_SECONDS = 10.0
"""Limit of the processor time of all probes of a template, in seconds; a common template takes 0.1 s or less."""

MEMORY_BYTES = 2 << 30
"""Limit of the address space of the probing process, in bytes. It is twice as large for a request with a vocabulary."""

_START_SECONDS = 60.0  # time for Python to start on a busy machine, before the template's own time
_BUSY_FACTOR = 10  # on a busy machine, a process may get only a tenth of the processor time
_LOOK_SECONDS = 0.1  # seconds between two checks of whether the caller still waits
_profiles: dict[str, TemplateProfile] = {}


def probe(
    template: ChatTemplate,
    options: Mapping[str, Any] | None = None,
    *,
    now: datetime | None = None,
    seconds: float = PROBE_SECONDS,
    check_cancelled: Callable[[], object] | None = None,
) -> TemplateProfile:
    """Return the traits of a template. Blocks the thread: call this in a worker thread.

    Profiles and learnt turn formats are cached for the life of this process. A template of the package is probed in
    this process, any other template in a separate one.

    Args:
        template: the template. Probe it before this process first renders it, since its rendering may never end.
        options: values of names that the template reads, such as `enable_thinking`.
        now: the current time for the template; None for the time of this call.
        seconds: limit of processor time of the separate process.
        check_cancelled: function that is called while this waits; an exception from it ends the wait and the separate
            process. In a thread of `anyio.to_thread.run_sync`, give `anyio.from_thread.check_cancelled`.

    Raises:
        UnusableTemplate: the template cannot be used. `fault` has the kind of fault; the message has the cause, and the
            fix where one is known.
    """
    request = request_of(template, options or {}, now or datetime.now())
    key = canonical_json(request)
    if key not in _profiles:
        if is_bundled(template):
            answer = answer_to(request)
        else:
            answer = in_process(request, seconds=seconds, check_cancelled=check_cancelled)
        _profiles[key] = TemplateProfile.from_json(answer["profile"])
        cache_format(template, options or {}, LearntFormat.from_json(answer["turn"]))
    return _profiles[key]


@functools.lru_cache(64)
def is_bundled(template: ChatTemplate) -> bool:
    """True if the template comes with the package, so its rendering is known to end."""
    return any(path.read_text(encoding="utf-8") == template.text for path in bundled_templates().values())


def request_of(
    template: ChatTemplate, options: Mapping[str, Any], now: datetime, *, wanted_bos: str = ""
) -> dict[str, Any]:
    """Return the request for the probing process, as JSON values; `wanted_bos` is the tokenizer's BOS token, or ""."""
    return {
        "text": template.text,
        "name": template.name,
        "variables": dict(template.variables),
        "response_template": template.response_template,
        "options": dict(options),
        "now": now.isoformat(),
        "wanted_bos": wanted_bos,
    }


# --- the calling process


def in_process(
    request: Mapping[str, Any], *, seconds: float = PROBE_SECONDS, check_cancelled: Callable[[], object] | None = None
) -> dict[str, Any]:
    """Return the answer of a separate process, which is killed at the time limit or when this call is cancelled.

    Raises:
        UnusableTemplate: the template cannot be used, or takes too much time or memory.
        BadModel: the vocabulary in the request cannot be used.
    """
    name = request["name"]
    command = [sys.executable, "-P", "-m", "runner.template_probe", str(seconds)]
    environment = {**os.environ, "PYTHONPATH": _import_path(), "TOKENIZERS_PARALLELISM": "false"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        try:
            said, complaint = _answered(process, request, _BUSY_FACTOR * seconds + _START_SECONDS, check_cancelled)
        except subprocess.TimeoutExpired:
            process.kill()
            raise _endless(name, seconds, "") from None
        except BaseException:  # the caller was interrupted, and nothing else would end the process in time
            process.kill()
            raise
    lines = [json.loads(line) for line in said.splitlines() if line.endswith(b"}")]
    last = lines[-1] if lines else {}
    if "answer" in last:
        answer: dict[str, Any] = last["answer"]
        return answer
    if "fault" in last:
        raise UnusableTemplate(TemplateFault(last["fault"]), last["message"])
    if "error" in last:
        raise getattr(runner.errors, last["error"])(last["message"])
    if process.returncode == -signal.SIGPROF:
        raise _endless(name, seconds, last.get("activity", ""))
    words = complaint.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
    raise UnusableTemplate(TemplateFault.FAILED, f"template {name!r} could not be probed: {words[-1]}")


def _answered(
    process: subprocess.Popen[bytes],
    request: Mapping[str, Any],
    seconds: float,
    check_cancelled: Callable[[], object] | None,
) -> tuple[bytes, bytes]:
    """Send the request to the process, and return its stdout and stderr when it ends.

    Raises:
        subprocess.TimeoutExpired: the process did not end within `seconds`.
    """
    asked: bytes | None = canonical_json(request).encode()
    deadline = time.monotonic() + seconds
    while True:
        try:
            return process.communicate(asked, timeout=_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            asked = None  # the request is written already
            if check_cancelled is not None:
                check_cancelled()
            if time.monotonic() > deadline:
                raise


def _endless(name: str, seconds: float, activity: str) -> UnusableTemplate:
    what = activity or "a conversation"
    return UnusableTemplate(
        TemplateFault.ENDLESS,
        f"template {name!r} was still rendering {what} after {seconds:g} s and was stopped: correct its loop, which "
        "does not end or runs far too often",
    )


def _import_path() -> str:
    """The import path with which the probing process finds this package from any folder."""
    own = str(Path(__file__).parents[1])
    return os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))


# --- the probing process


def answer_to(request: Mapping[str, Any]) -> dict[str, Any]:
    """Probe the template of a request in this process, and return the answer as JSON values."""
    template = ChatTemplate(
        request["text"],
        name=request["name"],
        variables=request["variables"],
        response_template=request["response_template"],
    )
    _say({"activity": "a question or a call"})
    renderer = usable_renderer(template, request["options"], datetime.fromisoformat(request["now"]))
    _say({"activity": "conversations of several turns"})
    profile = profile_of(renderer, wanted_bos=request["wanted_bos"])
    _say({"activity": "calls and reasoning"})
    answer = {"profile": profile.as_json(), "turn": learn_format(renderer).as_json()}
    _say({"activity": "tools with arguments of all sorts"})  # a run renders tools even with a template that shows none
    shown = template.renderer(renderer.options, renderer.now, fit_tools=None)
    unseen = [str(each) for each in unseen_arguments(shown.render_tool, ALL_SORTS)]
    if profile.carries_tools:
        answer["arguments"] = {"fitted": shown.fits_tools, "unseen": unseen}
    if "vocabulary" in request:
        from runner.tokens.probing.appends import appends_answer

        _say({"activity": "what may be appended to a turn"})
        answer |= appends_answer(renderer, profile, request["vocabulary"])
    return answer


_speaking = threading.local()


def _say(line: Mapping[str, Any]) -> None:
    """Write a line to the calling process, if this is a probing process."""
    if getattr(_speaking, "out", False):
        print(json.dumps(line), flush=True)


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    # A vocabulary may be large, so a request with one gets twice the memory.
    memory = MEMORY_BYTES * (2 if request.get("vocabulary") else 1)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # The signal's default action ends this process, also inside a C function, and after the caller is gone. The limit
    # counts processor time, so that a template does not look endless on a busy machine. A template cannot wait, so its
    # processor time always grows.
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    _speaking.out = True
    try:
        answer = answer_to(request)
    except UnusableTemplate as error:
        _say({"fault": error.fault, "message": str(error)})
    except DeltarunnerError as error:
        _say({"error": type(error).__name__, "message": str(error)})
    except MemoryError:
        limit = f"{memory >> 30} GiB"
        _say(
            {
                "fault": TemplateFault.TOO_BIG,
                "message": f"template {request['name']!r} takes more than {limit} of memory",
            }
        )
    else:
        _say({"answer": answer})


if __name__ == "__main__":
    main()
