"""deltarunner: many multi-turn agent episodes at once against vLLM in the same process, with exact token ids.

All public names are imported from this package. Each name is loaded on first use, so importing the package is cheap.
`__init__.pyi` lists the names and their modules.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import lazy_loader

from runner.engines.scripted.run_files import set_opener

if TYPE_CHECKING:
    from runner.store.reader import RunFile

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__.remove("__version__")  # `from runner import *` imports only the names that authors use


def _open_run_file(path: Path) -> RunFile:
    from runner.store.reader import RunFile  # imported late, since it loads SQLite and numpy

    return RunFile(path)


# runner.engines must not import runner.store, so this package, which may import both, connects them.
set_opener(_open_run_file)
