"""State is layered as imports are: no file uses what another one keeps private."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.privates import File

SRC = Path(__file__).parents[2] / "src" / "symcomm"

# What torch and namedtuples call by such names, though something of ours has one of the same name (attributes of
# anything, or of a name), and classes that we patch.
NOT_OURS = set(
    """
    _C _add_ephemeral_timeout _detect_dma_connectivity _dump_fr_trace _end_coalescing _get_backend _get_sequence_number
    _get_sequence_number_for_group _make _parameters _register_backend _remove_autograd_hooks _replace
    _set_comm_hook_name _set_default_backend _set_group_desc _set_group_name _set_sequence_number_for_group
    _start_coalescing _wait_for_pending_works
    options._devices options._threads options._timeout opts._timeout tensor._values
    base.__dict__ kind.__dict__ owner.__dict__
    """.split()
)
# Modules in the place of torch's, which have its private names too.
IN_PLACE_OF_TORCH = ("c10d/__init__.py", "comm.py")


def is_ours(written: str) -> bool:
    *_, owner, name = written.split(".")
    return name not in NOT_OURS and f"{owner}.{name}" not in NOT_OURS


def found_in(sources: dict[str, str]) -> dict[str, set[str]]:
    files = {name: File(source) for name, source in sources.items()}
    ours = set().union(*(file.defined() for file in files.values()))
    found = {name: {use for use in file.foreign_privates(ours) if is_ours(use)} for name, file in files.items()}
    return {name: uses for name, uses in found.items() if uses}


def test_no_file_uses_what_another_one_keeps_private():
    sources = {str(path.relative_to(SRC)): path.read_text() for path in SRC.rglob("*.py")}
    assert found_in({name: text for name, text in sources.items() if name not in IN_PLACE_OF_TORCH}) == {}


OTHER = """
_state = 1
class Other:
    _count: int
    __slots__ = ("_slot",)
    def __init__(self):
        self._other, self._own = 1, 2
    def _call(self): ...
"""
OWN = """
from __future__ import annotations
import torch
from symcomm import other
class Own:
    _next: Own | None
    def __init__(self):
        self._own = 1
    def use(self, x, own: Own, others: list[Own]):
        {}
class Child(Own):
    pass
class Unlike:
    pass
"""


@pytest.mark.parametrize(
    "use",
    [
        "x._other",
        "x._own",  # some class of this file has one too
        "self.x._own",
        "x._count = 1",
        "x._call()",
        "x._slot",
        "other._state",
        "x.__dict__",
        "getattr(x, '_own', None)",
        "setattr(x, '_other', 1)",
        "own._other",
        "Unlike()._own",
        "[one._own for one in x]",
        "(lambda y: y._own)(x)",
        "own._next._other",
        "torch.zeros(x)._own",
        "vars(x)",
    ],
)
def test_a_foreign_private_is_found(use):
    assert list(found_in({"other.py": OTHER, "own.py": OWN.format(use)})) == ["own.py"]


@pytest.mark.parametrize(
    "use",
    [
        "self._own",
        "self._other",  # a base class's, in another file
        "x.other",
        "x.__class__",
        "own._own",
        "own._next._own",
        "own.__dict__",
        "Own._own",
        "Child()._own",
        "others[0]._own",
        "[one._own for one in sorted(others)]",
        "isinstance(x, Own) and x._own",
        "type(x) is Own and x._own",
        "Own.__new__(Own)._own",
        "type(self)._own",
        "torch.distributed._own",
        "options._timeout",
    ],
)
def test_what_is_the_file_s_own_is_not(use):
    assert found_in({"other.py": OTHER, "own.py": OWN.format(use)}) == {}


def test_an_import_of_a_private_name_is_found():
    own = "from symcomm.other import _state\nfrom torch.other import _count\n"
    assert found_in({"other.py": OTHER, "own.py": own}) == {"own.py": {"import symcomm.other._state"}}
