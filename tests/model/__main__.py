"""``make prove``: explores every model to its end, then finds every defect that was put in on purpose."""

from __future__ import annotations

import sys
import time

from tests.model.explorer import explore
from tests.model.suite import LONG, QUICK, mutants


def main() -> int:
    wrong = 0
    for make in [*QUICK, *LONG]:
        began = time.monotonic()
        verdict = explore(make())
        print(f"{verdict}, {time.monotonic() - began:.1f} s", flush=True)
        wrong += bool(verdict.wrong)
    for name, what, makers in mutants():
        found = next((verdict for make in makers if (verdict := explore(make(name))).wrong), None)
        print(f"without a line of {what}: " + (f"found: {found.wrong}" if found else "NOT FOUND"), flush=True)
        wrong += found is None
    print("all models hold, and every defect was found" if not wrong else f"{wrong} are wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
