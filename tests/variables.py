"""Check that a test leaves environment variables that change other programs as it found them.

Variables that libraries set when they are imported, such as `VLLM_*`, `TORCH*`, `RAY_*` and `LD_LIBRARY_PATH` (vLLM on
a CPU), are not checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["unchanged"]

CHECKED: Final = re.compile(
    r"LD_PRELOAD|PYTHON(PATH|HOME|STARTUP|WARNINGS|HASHSEED|OPTIMIZE|DONTWRITEBYTECODE)|VIRTUAL_ENV"
    r"|PATH|SHELL|HOME|TMPDIR|TEMP|TMP|XDG_\w+|LANG|LC_\w+|TERM|COLUMNS|LINES|NO_COLOR|FORCE_COLOR"
    r"|GIT_\w+|DOCKER_\w+|CONTAINER\w*|DELTARUNNER_\w+|\w+_PROXY|\w+_proxy"
)
"""Variables that the loader of programs, Python, shells, terminals, git, container engines and deltarunner read."""


@contextmanager
def unchanged() -> Iterator[None]:
    """Restore the checked variables after this block, and assert that none differs.

    Raises:
        AssertionError: the block left a variable changed; the message names it.
    """
    before = _checked()
    yield
    after = _checked()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in changed:
        os.environ.pop(name, None)
        os.environ.update({name: before[name]} if name in before else {})
    assert not changed, f"the test leaves these environment variables changed: {', '.join(changed)}"


def _checked() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if CHECKED.fullmatch(name)}
