"""Training that outlives its ranks.

session.py  Session: runs the steps of a training loop, shrinks and grows the group, undoes the step that was cut short
state.py    Snapshot: what is undone, and handed over to ranks that come later
"""

from symcomm.elastic.session import Session
from symcomm.elastic.state import Snapshot
from symcomm.group.default import is_newcomer
from symcomm.group.grow import close

__all__ = ["Session", "Snapshot", "close", "is_newcomer"]
