"""deltarunner: many multi-turn agent episodes at once against vLLM in the same process, with exact token ids.

Every public name comes from here and is loaded when it is first asked for: importing this package loads nothing heavy.
Which names there are, and where each is, stands in `__init__.pyi`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__.remove("__version__")  # `from runner import *` is to give an author's names and no other


def _open_run_file(path: object) -> object:  # here, since a scripted engine may not know what stands above it
    from runner.store.reader import RunFile

    return RunFile(path)
