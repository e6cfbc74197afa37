"""A kit for tests of distributed code: ranks without ports or files, deadlines, and faults at chosen calls.

running.py    ranks as threads, or as forks of the process that tests; what each did
faults.py     faults by their sentences: kill, stop, raise, delay, at a call of a rank; a fault at every call in turn
schedule.py   the order in which ranks came to their calls, recorded and played again
decorator.py  ``ranks``, for pytest
"""

from symcomm.testing.decorator import ranks
from symcomm.testing.faults import Fault, Faults, every_fault
from symcomm.testing.running import RanksFailed, per_rank, run
from symcomm.testing.schedule import Schedule

__all__ = ["Fault", "Faults", "RanksFailed", "Schedule", "every_fault", "per_rank", "ranks", "run"]
