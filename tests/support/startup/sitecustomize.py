"""Programs that tests start load torch a third faster: loading it makes 170,000 objects, and the collector looks at all
of them again and again, and once more when the program ends. What a program makes itself is collected as ever.

Python runs this first in every process whose PYTHONPATH has this folder (tests/conftest.py).
"""

import gc
import importlib.util
import sys

LARGE = {"torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed"}


class Uncollected:
    """A loader's stand-in: what the module and those that it loads make is not collected."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def exec_module(self, module):
        collects = gc.isenabled()
        gc.disable()
        try:
            self._loader.exec_module(module)
        finally:
            module.__spec__.loader = module.__loader__ = self._loader
            gc.freeze()
            if collects:
                gc.enable()


class Finder:
    """Finds large modules as others do, and has them loaded uncollected."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in LARGE:
            return None
        LARGE.discard(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Uncollected(spec.loader)
        return spec


sys.meta_path.insert(0, Finder)
