"""A kit for tests of distributed code: ranks without ports or files, deadlines, and faults at chosen calls.

running.py    ranks as threads, or as forks of the process that tests; what each did
faults.py     faults by their sentences: kill, stop, raise, delay, at a call of a rank; a fault at every call in turn
schedule.py   the order in which ranks came to their calls, recorded and played again
decorator.py  ``ranks``, for pytest
plugin.py     options of pytest

Names are loaded on first use: pytest loads the plugin wherever Symcomm is installed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symcomm.testing.decorator import ranks
    from symcomm.testing.faults import Fault, Faults, every_fault
    from symcomm.testing.running import RanksFailed, per_rank, run
    from symcomm.testing.schedule import Schedule

__all__ = ["Fault", "Faults", "RanksFailed", "Schedule", "every_fault", "per_rank", "ranks", "run"]

_PUBLIC = {
    "decorator": ("ranks",),
    "faults": ("Fault", "Faults", "every_fault"),
    "running": ("RanksFailed", "per_rank", "run"),
    "schedule": ("Schedule",),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _PUBLIC.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module 'symcomm.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"symcomm.testing.{module}"), name)
