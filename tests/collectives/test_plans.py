"""Every collective, played by the interpreter on all its ranks: right values, no race, no deadlock, no overrun."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from symcomm import collectives
from symcomm.collectives import Limits, Need, Plan, interpret
from symcomm.collectives.interpret import Buffer, DeadlockError, PlanError, RaceError, Tensors, describe, run
from symcomm.collectives.plan import ALGORITHMS, At, Copy, Loop, Reduce, Signal, Space, Wait
from symcomm.collectives.select import DEFAULT, elements_of
from symcomm.types import DType, RedOpType
from tests.support.plan_cases import BY_NODE, ROOTED, TINY, UNROOTED, Case, Operation, combine, explain, on_nodes

pytestmark = [pytest.mark.without_torch, pytest.mark.long]


def play(cases: Sequence[Case], schedule: int | str) -> None:
    """Runs the cases one after the other on one group and compares what every rank got."""
    operations = [Operation(case, salt) for salt, case in enumerate(cases)]
    stage = max(case.limits.stage_bytes for case in cases)
    results = run([o.plans for o in operations], [o.tensors for o in operations], schedule, stage, combine)
    for operation, result in zip(operations, results, strict=True):
        for rank, expected in enumerate(operation.expected):
            assert len(expected) == len(result[rank])
            for want, got in zip(expected, result[rank], strict=True):
                assert np.array_equal(want, got), f"{operation.case}: rank {rank} got {got}, wanted {want}"


# --- every collective, world, root, count ----------------------------------------------------------


def counts_for(world: int) -> list[int]:
    """Nothing, one, fewer than ranks, odd, around one chunk (64 elements of 8 bytes), several chunks."""
    return sorted({0, 1, world - 1, 37, 63, 64, 65, 150 if world > 4 else 333})


def cases_for(world: int) -> list[Case]:
    """All of them up to eight ranks, in one of the forms each; a sample above that."""
    pick = random.Random(world)
    cases = []
    for name in (*ROOTED, *UNROOTED):
        for root in range(world) if name in ROOTED else [0]:
            for count in counts_for(world):
                for symmetric in ("none", "all", "mixed"):
                    forms = {form: pick.random() < 0.4 for form in ("uneven", "listed", "in_place")}
                    variant = pick.choice(["one_shot", "two_shot"])
                    limits = replace(TINY, two_rank_variant=variant)
                    cases.append(Case(name, world, count, root, **forms, symmetric=symmetric, limits=limits))
    pick.shuffle(cases)
    return cases if world <= 8 else cases[:60]


def schedules(world: int) -> list[int | str]:
    return [1, 2, "round-robin", "slowest 0", f"slowest {world - 1}", "fastest 0", f"fastest {world - 1}", 3]


@pytest.mark.parametrize("world", range(1, 17))
def test_every_collective(world: int):
    """Three different operations in a row, so that staging halves are used again."""
    cases = [*cases_for(world), Case("barrier", world, 0)]
    kinds = schedules(world)
    for number in range(0, len(cases), 3):
        trio, schedule = cases[number : number + 3], kinds[number // 3 % len(kinds)]
        try:
            play(trio, schedule)
        except (PlanError, AssertionError) as error:
            raise AssertionError(explain(trio, schedule)) from error


@pytest.mark.parametrize("seed", range(8))
def test_any_limits(seed: int):
    """Staging areas with no room to spare, chunks of all sizes, elements of all sizes."""
    pick = random.Random(seed)
    for _ in range(25):
        world = pick.randint(2, 6)
        lanes = 3 * (world - 1) * 64
        stage = pick.choice([max(lanes, (2 * world + 2) * 64), 2048 + pick.randrange(64), 4096])
        limits = Limits(
            stage_bytes=stage,
            chunk_bytes=pick.choice([1, 64, 200, 512, 4096, 10**6]),
            one_shot_bytes=pick.choice([0, 300, 10**6]),
            one_shot_extra=pick.choice([0, 10**6]),
            root_extra=pick.choice([0, 10**6]),
            direct_bytes=pick.choice([0, 1, 500, 10**6]),
            two_rank_variant=pick.choice(["one_shot", "two_shot"]),
        )
        dtype = pick.choice([DType.INT8, DType.BFLOAT16, DType.FLOAT32, DType.INT64, DType.COMPLEX128])
        cases = [
            Case(
                pick.choice((*ROOTED, *UNROOTED)),
                world,
                pick.randrange(1 + pick.choice([2, 64, 3000]) // dtype.itemsize),
                pick.randrange(world),
                *(pick.random() < 0.5 for _ in range(3)),
                pick.choice(["none", "all", "mixed"]),
                limits,
                dtype,
            )
            for _ in range(3)
        ]
        schedule = pick.choice(schedules(world))
        try:
            play(cases, schedule)
        except (PlanError, AssertionError) as error:
            raise AssertionError(explain(cases, schedule)) from error


def test_real_limits():
    """The thresholds that ship, just below and just above each, with few elements per byte of tensor."""
    for name in (*ROOTED, *UNROOTED):
        for nbytes in (32 << 10, (32 << 10) + 16, 256 << 10, (256 << 10) + 16, 3_000_000):
            for symmetric in ("none", "all"):
                play([Case(name, 2, nbytes // 16, 1, symmetric=symmetric, limits=Limits(), dtype=DType.COMPLEX128)], 1)


@pytest.mark.parametrize("name", [*ROOTED, *UNROOTED])
def test_many_ranks(name: str):
    for symmetric in ("none", "mixed"):
        play([Case(name, 33, 20, 17, symmetric=symmetric, limits=replace(TINY, stage_bytes=8192))], 1)


# --- machines of several nodes -----------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "width"), [(2, 2), (3, 2), (4, 2), (2, 4), (5, 2), (8, 2)])
def test_by_node(nodes: int, width: int):
    """Chunks that fill a turn or not, one and several, in place or not, in a list or not, wherever tensors are."""
    pick, world = random.Random(nodes * width), nodes * width
    cases = []
    for name in BY_NODE:
        for count in (8, 9, 63, 64, 65, 150, 333):
            for symmetric in ("none", "all", "mixed"):
                forms = {form: pick.random() < 0.4 for form in ("listed", "in_place")}
                limits = on_nodes(nodes, width, replace(TINY, stage_bytes=8192) if nodes == 8 else TINY)
                cases.append(
                    Case(name, world, count, pick.randrange(world), **forms, symmetric=symmetric, limits=limits)
                )
    pick.shuffle(cases)
    kinds = schedules(world)
    for number in range(0, len(cases), 3):
        trio, schedule = cases[number : number + 3], kinds[number // 3 % len(kinds)]
        assert {plan.name for case in trio for plan in Operation(case).plans} == {"by-node"}
        try:
            play(trio, schedule)
        except (PlanError, AssertionError) as error:
            raise AssertionError(explain(trio, schedule)) from error


def crossed(plans: Sequence[Plan], nodes: Sequence[int], part: str) -> int:
    """Bytes that ranks read from or write to memory of other nodes."""
    total = 0
    for plan in plans:
        for step in getattr(plan, part):
            turns, body = (step.turns, step.body) if isinstance(step, Loop) else (1, (step,))
            for inner in body:
                if isinstance(inner, Copy | Reduce):
                    places = [*inner.dst, *(inner.src if isinstance(inner, Reduce) else (inner.src,))]
                    far = [p for p in places if p.space > Space.OUT and nodes[p.index] != nodes[plan.rank]]
                    total += turns * inner.nbytes * len(far)
    return total


@pytest.mark.parametrize("part", ["staged", "direct"])
@pytest.mark.parametrize("name", BY_NODE)
def test_each_byte_crosses_between_nodes_once(name: str, part: str):
    """To each node but where it comes from. Sums cross once up, combined so far, and once down, as the result: that of
    a reduce_scatter only where it belongs."""
    for nodes, width in ((2, 8), (4, 4)):
        limits = on_nodes(nodes, width, Limits())
        count = 320_000
        made = [make(name, rank, 16, count, limits=limits) for rank in range(16)]
        flat = [make(name, rank, 16, count) for rank in range(16)]
        times = {"all_reduce": 2, "broadcast": 1, "all_gather": 16, "reduce_scatter": 16 + 16 // nodes}[name]
        assert crossed(made, limits.nodes, part) == times * (nodes - 1) * count * 8
        saved = {"reduce_scatter": width * nodes / (nodes + 1)}.get(name, width)
        assert crossed(flat, limits.nodes, part) == pytest.approx(saved * crossed(made, limits.nodes, part), rel=0.01)


@pytest.mark.parametrize("root", [0, 1])
def test_two_ranks_copy_half_of_a_symmetric_broadcast_each(root: int):
    plans = [collectives.broadcast(rank, 2, 100_001, DType.FLOAT32, root) for rank in range(2)]
    copied = [sum(step.nbytes for step in plan.direct or [] if isinstance(step, Copy)) for plan in plans]
    assert sum(copied) == 400_004 and abs(copied[0] - copied[1]) <= 128
    assert plans[0].needs == plans[1].needs == [Need.INPUT if rank == root else Need.OUTPUT for rank in range(2)]


def test_what_is_combined_by_node_and_what_is_not():
    """Where a result so far cannot be stored, or ranks of a node do not follow each other, plans are as on one node."""

    def name(
        nodes: tuple[int, ...], dtype: DType = DType.FLOAT32, op: RedOpType = RedOpType.SUM, n: int = 1 << 20
    ) -> str:
        limits = Limits(node_ranks=2).on_nodes(nodes)
        return collectives.all_reduce(0, len(nodes), n, dtype, op, limits).name

    assert name((0, 0, 1, 1)) == name((5, 5, 2, 2)) == name((0, 0, 1, 1), DType.INT8, RedOpType.BXOR) == "by-node"
    assert name((0, 0, 1, 1), n=100) == "one-shot"
    few = Limits().on_nodes((0, 0, 0, 1, 1, 1))
    assert collectives.all_reduce(0, 6, 1 << 20, DType.FLOAT32, RedOpType.SUM, few).name == "two-shot"
    flat = [(0, 0, 0, 0), (0, 1, 0, 1), (0, 1, 2, 3), (0, 0, 0, 1), (0, 0, -1, -1), (0, 0, 1, 1, 1)]
    assert {name(nodes) for nodes in flat} == {"two-shot"}
    three = (0, 0, 0, 1, 1, 1)  # no subtrees of six ranks; where nothing is combined, that does not matter
    assert name(three) == "two-shot"
    limits = Limits(node_ranks=2).on_nodes(three)
    assert collectives.broadcast(0, 6, 1 << 20, DType.FLOAT32, 0, limits).name == "by-node"
    assert {name((0, 0, 1, 1), dtype) for dtype in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8_E5M2)} == {"two-shot"}
    assert {name((0, 0, 1, 1), op=op) for op in (RedOpType.AVG, RedOpType.PREMUL_SUM)} == {"two-shot"}


def test_by_node_in_a_staging_area_without_room():
    limits = replace(on_nodes(2, 4), stage_bytes=2 * (4 + 2) * 64, chunk_bytes=64)
    play([Case("all_reduce", 8, 200, limits=limits)], 1)
    with pytest.raises(ValueError, match="stage_bytes must be at least 768, got 700"):
        collectives.all_reduce(0, 8, 200, DType.INT64, RedOpType.SUM, replace(limits, stage_bytes=700))
    with pytest.raises(ValueError, match="stage_bytes must be at least 512, got 500"):
        collectives.broadcast(0, 8, 200, DType.INT64, 0, replace(limits, stage_bytes=500))
    with pytest.raises(ValueError, match="stage_bytes must be at least 1280, got 1200"):
        collectives.reduce_scatter(
            0, 8, (200,) * 8, DType.INT64, RedOpType.SUM, limits=replace(limits, stage_bytes=1200)
        )
    with pytest.raises(ValueError, match="stage_bytes must be at least 256, got 200"):
        collectives.all_gather(0, 8, (200,) * 8, DType.INT64, limits=replace(limits, stage_bytes=200))


# --- what a plan promises ----------------------------------------------------------------------------


def steps_of(plan: Plan) -> list[Any]:
    blocks = [*plan.head, *plan.staged, *(plan.direct or [])]
    return [inner for step in blocks for inner in (step.body if isinstance(step, Loop) else (step,))]


@pytest.mark.parametrize("name", [*ROOTED, *UNROOTED])
def test_steps_do_not_grow_with_size(name: str):
    lengths = []
    for count in (10_000_000, 1_000_000_000):
        plans = [make(name, rank, 4, count) for rank in range(4)]
        lengths.append(max(len(steps_of(plan)) for plan in plans))
    assert lengths[0] == lengths[1] < 100


def make(name: str, rank: int, world: int, count: int, **more: Any) -> Plan:
    function, counts, dtype = getattr(collectives, name), (count,) * world, DType.INT64
    arguments: dict[str, tuple] = {
        "all_reduce": (count, dtype, RedOpType.SUM),
        "reduce": (count, dtype, RedOpType.SUM, 1),
        "reduce_scatter": (counts, dtype, RedOpType.SUM),
        "all_gather": (counts, dtype),
        "broadcast": (count, dtype, 1),
        "gather": (counts, dtype, 1),
        "scatter": (counts, dtype, 1),
        "all_to_all": (count, dtype),
    }
    return function(rank, world, *arguments[name], **more)


def test_own_contribution_is_never_staged_for_its_owner():
    for name in (*ROOTED, *UNROOTED):
        for count in (10, 10_000, 1_000_000):
            for rank in range(3):
                for step in steps_of(make(name, rank, 3, count)):
                    sources = step.src if isinstance(step, Reduce) else [step.src] if isinstance(step, Copy) else []
                    assert not any(at.space == Space.STAGE and at.index == rank for at in sources), (name, count)


def test_sources_come_in_rank_order():
    for name in ("all_reduce", "reduce", "reduce_scatter"):
        for count in (10, 10_000, 1_000_000):
            for rank in range(4):
                for step in steps_of(make(name, rank, 4, count)):
                    if isinstance(step, Reduce):
                        owners = [rank if at.space == Space.IN else at.index for at in step.src]
                        assert owners == [0, 1, 2, 3]


def test_a_world_of_one_still_reduces():
    for name in ("all_reduce", "reduce", "reduce_scatter"):
        arguments = {"reduce_scatter": ((5,), DType.BOOL, RedOpType.SUM), "reduce": (5, DType.BOOL, RedOpType.SUM, 0)}
        plan = getattr(collectives, name)(0, 1, *arguments.get(name, (5, DType.BOOL, RedOpType.SUM)))
        assert plan.staged == [Reduce((At(Space.OUT),), (At(Space.IN),), 5)]


def test_signature_tells_uneven_counts_apart():
    counts = [collectives.all_gather(0, 3, c, DType.INT8).count for c in ((1, 2, 3), (3, 2, 1), (2, 2, 2))]
    assert len(set(counts)) == 3
    assert counts[2] == 6
    assert all(0 <= n < 1 << 63 for n in counts)
    assert [elements_of(n) for n in counts] == [6, 6, 6]
    everywhere = {collectives.all_gather(rank, 3, (1, 2, 3), DType.INT8).count for rank in range(3)}
    assert len(everywhere) == 1


def test_lists_of_inputs_of_one_size_are_one_tensor_if_they_lie_so():
    for name in ("reduce_scatter", "scatter"):
        listed, single = (make(name, 0, 3, 10_000, listed=listed) for listed in (True, False))
        assert listed.direct is not None
        assert single.direct is not None
        assert listed.count == single.count, "so they may meet"
        assert (listed.piece_bytes, listed.apart) == (single.piece_bytes, single.apart) and listed.apart


def test_lists_of_inputs_of_different_sizes_never_meet_single_tensors():
    """Peers know one address of a symmetric tensor, and such a list has several."""
    counts = (10_000, 20_000, 30_000)
    for name, rest in (("reduce_scatter", (RedOpType.SUM,)), ("scatter", (0,))):
        listed, single = (getattr(collectives, name)(0, 3, counts, DType.INT64, *rest, way) for way in (True, False))
        assert listed.direct is not None and listed.apart
        assert single.direct is not None and not single.apart
        assert listed.count != single.count
        assert elements_of(listed.count) == elements_of(single.count) == sum(counts)


def test_even_all_to_all_is_the_same_call_however_it_is_written():
    even = collectives.all_to_all(0, 2, 5, DType.INT8)
    matrix = collectives.all_to_all(0, 2, ((5, 5), (5, 5)), DType.INT8)
    assert even.encode() == matrix.encode()


def test_a_staging_area_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="stage_bytes must be at least 2176, got 1024"):
        collectives.all_reduce(0, 16, 10**6, DType.INT8, RedOpType.SUM, Limits(stage_bytes=1024))


def one_shot_until(call: Callable[..., Plan], world: int, *args: int, limits: Limits = DEFAULT) -> int:
    """The largest power of two, of bytes, that ``world`` ranks reduce in one shot."""
    sizes = [1 << k for k in range(20)]
    plans = {n: call(0, world, n, DType.INT8, RedOpType.SUM, *args, limits=limits) for n in sizes}
    return max(n for n, plan in plans.items() if plan.name == "one-shot")


def test_the_more_ranks_the_sooner_they_share_the_work():
    reached = [one_shot_until(collectives.all_reduce, world) for world in (2, 4, 8, 16)]
    assert reached == [32 << 10, 4 << 10, 1 << 10, 512]
    reached = [one_shot_until(collectives.reduce, world, 0) for world in (4, 8, 16)]
    assert reached == [32 << 10, 16 << 10, 4 << 10]


def test_ranks_that_share_cores_meet_once():
    assert one_shot_until(collectives.all_reduce, 16, limits=Limits().crowded()) == 32 << 10


# --- the interpreter's own words ---------------------------------------------------------------------


def two_ranks(first: Plan, second: Plan) -> list[list[list[Any]]]:
    tensors = [
        [Tensors([Buffer.of(f"input of {r}", [r] * 8)], [Buffer.of(f"output of {r}", [0] * 8)]) for r in range(2)]
    ]
    return run([[first, second]], tensors, 1, 4096)


def empty(rank: int, **parts: Any) -> Plan:
    return replace(collectives.barrier(rank, 2), dtype=DType.INT64, **parts)


def test_deadlock_names_who_waits_for_whom():
    with pytest.raises(
        DeadlockError,
        match=r"rank 0 \(operation 1, staged step 0, turn 0: wait for rank 1 to signal 2\) waits for rank 1",
    ):
        two_ranks(empty(0, staged=[Wait(1, 2)]), empty(1))


def test_race_names_step_space_and_range():
    late = [Copy((At(Space.STAGE, 1),), At(Space.IN), 64)]
    read = [Copy((At(Space.OUT),), At(Space.STAGE, 1), 64)]
    with pytest.raises(
        RaceError, match=r"rank 0 reads elements 0 to 8 of STAGE\[1\] half 1|rank 1 overwrites elements 0 to 8"
    ):
        two_ranks(empty(0, staged=read), empty(1, staged=late))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Copy((At(Space.OUT),), At(Space.IN, 0, 8), 64)], "bytes 8 to 72 of input of 0, which has 64"),
        ([Copy((At(Space.STAGE, 0, 4064),), At(Space.IN), 64)], "bytes 4064 to 4128 of STAGE"),
        ([Copy((At(Space.OUT),), At(Space.IN, 1), 64)], r"there is no IN\[1\]"),
        ([Copy((At(Space.OUT),), At(Space.PEER_IN, 1), 64)], r"PEER_IN\[1\] cannot be reached"),
        ([Copy((At(Space.OUT),), At(Space.IN), 12)], "12 bytes at 0 are not whole elements"),
        ([Copy((At(Space.OUT, 0, 8),), At(Space.OUT), 16)], "places overlap in output of 0"),
        ([Signal(3), Signal(3)], "signal 3 does not go up"),
        ([Copy((At(Space.OUT),), At(Space.STAGE, 1), 8)], "which nobody has written"),
    ],
)
def test_bad_steps_are_refused(steps: list[Any], message: str):
    with pytest.raises(PlanError, match=message):
        two_ranks(empty(0, staged=steps), empty(1))


def test_different_calls_are_refused():
    with pytest.raises(PlanError, match="ranks . and . differ"):
        two_ranks(empty(0), replace(empty(1), count=3))


def test_describe():
    text = describe(collectives.all_reduce(1, 2, 100_000, DType.FLOAT32, RedOpType.SUM))
    assert text.splitlines()[:3] == [
        "all_reduce on rank 1 of 2: two-shot (400000 bytes, two ranks: two_rank_variant is two_shot)",
        "  head",
        "    copy 100032 from IN[0]+0 to STAGE[1]+0",
    ]
    assert "wait for all to signal 2" in text


@pytest.mark.parametrize("name", [*ROOTED, *UNROOTED, "barrier"])
def test_plans_can_be_printed(name: str, capsys: pytest.CaptureFixture[str]):
    interpret.main([name, "3", "1000"])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith(name)] == [
        f"{name} on rank {rank} of 3" for rank in range(3)
    ]


# --- encoding ----------------------------------------------------------------------------------------


def decode(data: bytes) -> Plan:
    """The reverse of Plan.encode, from the description of the format alone."""
    ints = list(struct.unpack(f"{len(data) // 8}q", data))
    world, rank, collective, dtype, redop, root, count, has_direct, *lengths, places, piece, name = ints[:14]
    attach, large, apart = ints[14:17]
    needs, rest = ints[17 : 17 + world], ints[17 + world :]
    rows = [rest[12 * k : 12 * k + 12] for k in range(sum(lengths))]
    table = rest[12 * len(rows) :]
    assert len(table) == 6 * places
    at = [At(Space(table[6 * k]), *table[6 * k + 1 : 6 * k + 6]) for k in range(places)]

    def simple(row: list[int]) -> Any:
        code, first_dst, dsts, first_src, srcs, nbytes, last, value, stride, who, *_ = row
        if code == 2:
            return Signal(value, stride)
        if code == 3:
            return Wait(who, value, stride)
        dst, src = tuple(at[first_dst : first_dst + dsts]), tuple(at[first_src : first_src + srcs])
        assert last == nbytes
        return Reduce(dst, src, nbytes) if code == 1 else Copy(dst, src[0], nbytes)

    parts: list[list[Any]] = []
    for length in lengths:
        block, rows = rows[:length], rows[length:]
        part: list[Any] = []
        while block:
            row, block = block[0], block[1:]
            if row[0] == 4:
                part.append(Loop(row[10], tuple(map(simple, block[: row[11]]))))
                block = block[row[11] :]
            else:
                part.append(simple(row))
        parts.append(part)
    head, staged, direct = parts
    return Plan(
        collectives.Collective(collective), rank, world, count, dtype, redop, root, ALGORITHMS[name], "", head, staged,
        direct if has_direct else None, [Need(n) for n in needs] if has_direct else (), piece, bool(apart), attach,
        bool(large),
    )  # fmt: skip


@pytest.mark.parametrize("name", [*ROOTED, *UNROOTED])
def test_encoding_round_trip(name: str):
    for count in (0, 5, 30_000, 1_000_000):
        for rank in range(3):
            plan = make(name, rank, 3, count)
            assert decode(plan.encode()) == replace(plan, why="")
            assert len(plan.encode()) % 8 == 0
