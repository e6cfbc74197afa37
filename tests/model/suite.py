"""Which models there are, and what each protects: `make prove` explores all of them, the tests those that are quick."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.model import (
    admitting,
    agreeing,
    attaching,
    copying,
    deciding,
    giving_up,
    leaving,
    refusing,
    sleeping,
    voiding,
)
from tests.model.explorer import Model

Maker = Callable[..., Model]

QUICK: list[Callable[[], Model]] = [
    sleeping.weak_meeting,
    sleeping.weak_failure,
    lambda: sleeping.meeting(world=2, operations=2, deaths=1),
    lambda: sleeping.meeting(world=3),
    giving_up.giving_up,
    voiding.two,
    voiding.passed_on,
    voiding.relayed,
    voiding.pushing,
    lambda: voiding.pushing(stopped=False),
    voiding.both_fail,
    copying.joint,
    lambda: copying.joint(gives_up=False),
    lambda: copying.joint(gives_up=False, deaths=1),
    attaching.attached,
    lambda: attaching.attached(gives_up=False),
    refusing.refusing,
    lambda: refusing.refusing(programs=((0, 0, 1), (1, 1, 0)), weak=True),
    lambda: refusing.refusing(programs=((0, 0, 0), (1, 0, 0), (0, 0, 0))),
    lambda: leaving.leaving(deaths=1),
    lambda: leaving.leaving(deaths=1, threads=("fail",)),
    lambda: leaving.leaving(deaths=1, threads=("report",)),
    lambda: leaving.leaving(threads=("records", "status")),
    lambda: leaving.leaving(threads=("queued",)),
    lambda: leaving.leaving(threads=("background",)),
    lambda: leaving.leaving(threads=("abort",), leavers=2),
    leaving.late_departure,
    lambda: agreeing.agreement(calls=(1, 1), deaths=1, interrupts=True, coarse=False),
    lambda: agreeing.agreement(calls=(2, 2)),
    lambda: agreeing.agreement(hurried=()),
    lambda: admitting.admission(deaths=2),
    lambda: admitting.admission(cut=(0,)),
    lambda: admitting.admission(verdicts=("go", "go"), cut=(0, 1)),
    lambda: deciding.deciding(world=2),
    lambda: deciding.deciding(ballots=(((1, 0),), ((2, 1),))),
]

LONG: list[Callable[[], Model]] = [
    lambda: refusing.refusing(programs=((0, 0, 0, 0), (1, 1, 1, 0)), weak=True),
    lambda: refusing.refusing(programs=((0, 0, 1, 0), (1, 1, 0, 0), (0, 0, 0, 0))),
    sleeping.weak_wake,
    lambda: sleeping.meeting(world=3, deaths=1),
    lambda: sleeping.meeting(world=3, operations=2, sleepers=(0, 1)),
    lambda: leaving.leaving(world=3, deaths=1, threads=("operation",)),
    lambda: leaving.leaving(world=3, deaths=1, threads=("abort",)),
    lambda: leaving.leaving(world=3, threads=("fail",)),
    lambda: leaving.leaving(deaths=1, threads=("fail", "report")),
    lambda: leaving.leaving(deaths=1, threads=("operation", "queued")),
    lambda: leaving.leaving(deaths=1, threads=("records", "background")),
    lambda: agreeing.agreement(calls=(2, 2), coarse=False),
    lambda: agreeing.agreement(calls=(2, 2), deaths=1, interrupts=True),
    lambda: agreeing.agreement(deaths=1, hurried=()),
    lambda: agreeing.agreement(hurried=(0, 1)),
    deciding.deciding,
]

# A mutant has to be found by one of these: not every model can show every defect.
MUTANTS: list[tuple[dict[str, str], list[Maker]]] = [
    (sleeping.MUTANTS, [
        sleeping.weak_meeting, sleeping.weak_failure, lambda without: sleeping.meeting(without, world=2, deaths=1),
    ]),
    (giving_up.MUTANTS, [giving_up.giving_up]),
    (voiding.MUTANTS, [voiding.two, voiding.passed_on, voiding.relayed]),
    (voiding.PUSH_MUTANTS, [voiding.pushing, voiding.both_fail]),
    (copying.MUTANTS, [copying.joint, lambda without: copying.joint(without, gives_up=False)]),
    (copying.DEATH_MUTANTS, [lambda without: copying.joint(without, gives_up=False, deaths=1)]),
    (attaching.MUTANTS, [attaching.attached, lambda without: attaching.attached(without, gives_up=False)]),
    (refusing.MUTANTS, [
        refusing.refusing, lambda without: refusing.refusing(without, ((0, 0), (1, 0)), weak=True),
    ]),
    (leaving.MUTANTS, [lambda without: leaving.leaving(without, deaths=1)]),
    (leaving.CALLER_MUTANTS, [leaving.careless]),
    (leaving.TWO_LEAVERS, [lambda without: leaving.leaving(without, threads=("abort",), leavers=2)]),
    (leaving.LATE_MUTANTS, [leaving.late_departure]),
    (agreeing.MUTANTS, [
        lambda without: agreeing.agreement(without, calls=(2, 2), hurried=()),
        lambda without: agreeing.agreement(without, calls=(2, 1)),
    ]),
    (admitting.MUTANTS, [lambda without: admitting.admission(without, deaths=1)]),
    (admitting.CUT_MUTANTS, [lambda without: admitting.admission(without, ("go", "go"), cut=(0,))]),
    (deciding.MUTANTS, [lambda without: deciding.deciding(without, world=2)]),
]  # fmt: skip


def mutants() -> Iterator[tuple[str, str, list[Maker]]]:
    """(name, what is left out of which function, models that may show it)"""
    for table, makers in MUTANTS:
        for name, what in table.items():
            yield name, what, makers
