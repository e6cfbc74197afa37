"""``torch.compile`` on our backend. The checks themselves are in tests/compile/checks/."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from symcomm.torch_versions import release
from tests.support.check_runner import run_checks
from tests.support.programs import environment, kernels_of

pytestmark = [pytest.mark.torch_versions, pytest.mark.long]

ROOT = Path(__file__).parents[2]
# Decorated functions, read from the text: this file needs no torch of its own.
CHECKS = [
    name
    for file in sorted((Path(__file__).parent / "checks").glob("*.py"))
    for name in re.findall(r"^@check(?:_on_four)?\ndef (\w+)", file.read_text(), re.MULTILINE)
]
# Since which torch a check makes sense, and why.
SINCE = {
    **dict.fromkeys(
        (
            "explained",
            "kernels_write_into_comm_buffers",
            "launches_leave_nothing_behind",
            "one_shot_where_torch_has_it",
            "reasons",
            "sizes_that_change",
            "symm_mem_operators_in_a_graph",
            "tensor_parallel",
            "the_same_memory_again",
        ),
        ((2, 12), "Inductor makes values in symmetric memory since torch 2.12"),
    ),  # fmt: skip
    "a_missing_rank_is_a_timeout": ((2, 12), "before torch 2.12 Dynamo traces names of our groups, not the objects"),
    "backward": ((2, 13), "before torch 2.13 the operator all_reduce has no gradient"),
    "ddp_with_its_reductions_in_the_graph": (
        (2, 12),
        "before torch 2.12 Dynamo traces names of our groups, not the objects",
    ),
    "every_operator": ((2, 12), "it counts what is made in symmetric memory, which Inductor allows since torch 2.12"),
    "groups_of_their_own": ((2, 12), "before torch 2.12 Dynamo traces names of our groups, not the objects"),
    "messages_are_waited_for": ((2, 12), "the operators of messages came with torch 2.12"),
    "results_of_other_strides_are_there_before_they_are_copied": (
        (2, 12),
        "before torch 2.12 its operators want contiguous tensors",
    ),
    "strides_as_in_eager_code": ((2, 12), "before torch 2.12 Inductor gives the results strides of its own"),
    "the_table": ((2, 12), "some operators came with torch 2.12"),
    "graphs_that_hold_a_group": ((2, 13), "the module that unboxes groups in graphs came with torch 2.13"),
    "odd_inputs": ((2, 13), "before torch 2.13 its all_gather_tensor along dimension 1 breaks a full graph"),
}
RANKS = 4  # of which most checks use two
DEADLINE = 1000  # of all together: 133 s of CPU time, 530 s on a busy machine; most of it in the C++ compiler


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """What every rank has to say about every check."""
    extra = {"TORCHINDUCTOR_CACHE_DIR": kernels_of("checks")}
    return run_checks("tests.compile.checks", CHECKS, environment(**extra), DEADLINE)


@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, told: dict[str, list[str]]):
    since, why = SINCE.get(name, ((0, 0), ""))
    if release(metadata.version("torch")) < since:
        pytest.skip(why)
    assert told[name] == [""] * RANKS, "\n".join([*told[name], *told["stderr"]])[-6000:]
