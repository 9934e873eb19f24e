"""deltarunner: many multi-turn agent episodes at once against vLLM in the same process, with exact token ids.

Every public name comes from here and is loaded when it is first asked for: importing this package loads nothing heavy.
Which names there are, and where each is, stands in `__init__.pyi`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import lazy_loader

from runner.engines.scripted.run_files import set_opener

if TYPE_CHECKING:
    from runner.store.reader import RunFile

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__.remove("__version__")  # `from runner import *` is to give an author's names and no other


def _open_run_file(path: Path) -> RunFile:
    from runner.store.reader import RunFile  # when the first one is opened, since it loads SQLite and numpy

    return RunFile(path)


# Engines stand below run files and do not know them; this package stands above both.
set_opener(_open_run_file)
