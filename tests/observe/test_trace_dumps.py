"""Dumps in PyTorch's format: against PyTorch's own function, and read by the real torchfrtrace."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch._C._distributed_c10d as theirs
import torch.distributed as dist

import symcomm
import symcomm.c10d as ours
from symcomm import errors
from symcomm.observe.recorder import dump
from symcomm.observe.recorder.torch_format import DTYPES
from symcomm.types import DType
from tests.support import loaded

pytestmark = pytest.mark.torch_versions

PAIRS = [
    ("_dump_fr_trace", pickle.loads),
    ("_dump_fr_trace_json", json.loads),
    ("_dump_nccl_trace", pickle.loads),
    ("_dump_nccl_trace_json", json.loads),
]


def every_call(group, rank: int, size: int) -> None:
    """On a torch.distributed group."""
    t = torch.ones(4 * size)
    pieces = [torch.empty(4 * size) for _ in range(size)]
    dist.all_reduce(t, group=group)
    dist.broadcast(t, 0, group=group)
    dist.all_gather(pieces, t, group=group)
    dist.barrier(group=group)
    dist.reduce(t, 0, group=group)
    dist.gather(t, pieces if rank == 0 else None, 0, group=group)
    dist.scatter(t, pieces if rank == 0 else None, 0, group=group)
    dist.all_to_all_single(torch.empty(4 * size), t, group=group)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Dumps of the same calls, by torch on Gloo and by ours: {function: (theirs, ours)}."""
    dumps = tmp_path_factory.mktemp("dumps") / "both"  # Gloo may have something to say on stdout
    code = (
        "import pathlib, pickle\n"
        "from tests.observe.test_trace_dumps import dumps_of_one_rank\n"
        f"pathlib.Path({str(dumps)!r}).write_bytes(pickle.dumps(dumps_of_one_rank()))"
    )
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "64"}
    done = loaded.run([sys.executable, "-c", code], timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    return pickle.loads(dumps.read_bytes())


def dumps_of_one_rank() -> dict:
    from symcomm.torch_backend.register import register

    register()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    every_call(None, 0, 1)
    wanted = {}
    for name, _ in PAIRS:
        fn = getattr(theirs, name.replace("nccl", "fr"))  # builds for CUDA have the others, too: for NCCL's calls alone
        wanted[name] = {"all": fn(), "bare": fn(includeCollectives=False), "active": fn(onlyActive=True)}
    dist.destroy_process_group()
    dist.init_process_group("symcomm", store=dist.HashStore(), rank=0, world_size=1)
    ours._reset_fr_recording_nccl()  # torch runs a barrier when it makes a group on us
    every_call(None, 0, 1)
    got = {}
    for name, _ in PAIRS:
        fn = getattr(ours, name)
        got[name] = {"all": fn(), "bare": fn(includeCollectives=False), "active": fn(onlyActive=True)}
    # Versions with a recorder for each backend have ours under its name, others have all in one.
    which = {"backend": "symcomm"} if "backend" in theirs._dump_fr_trace.__doc__ else {}
    for name, _ in PAIRS[:2]:
        fn = getattr(theirs, name)
        got[f"torch's {name}"] = {"all": fn(**which), "bare": fn(includeCollectives=False, **which), "which": which}
        got[f"torch's {name}"]["active"] = fn(onlyActive=True, **which)
    without = ours._dump_fr_trace(includeStackTraces=False)
    ours._reset_fr_recording_nccl()
    got["forgotten"] = ours._dump_fr_trace()
    dist.barrier()
    got["after"] = ours._dump_fr_trace()
    got["no stacks"] = without
    return {"theirs": wanted, "ours": got}


@pytest.mark.parametrize("name, read", PAIRS)
def test_the_same_keys_and_types(both, name, read):
    wanted, got = (read(both[side][name]["all"]) for side in ("theirs", "ours"))
    assert set(got) == set(wanted)
    assert got["version"] == wanted["version"]
    assert {k: set(v) for k, v in got["pg_config"].items()} == {"world": {"name", "desc", "ranks"}}
    assert [set(v) for v in got["pg_status"].values()] == [set(v) for v in wanted["pg_status"].values()]
    for mine, other in zip(got["entries"], wanted["entries"], strict=True):
        assert set(mine) - {"duration_ms"} == set(other)  # torch has it too where it measures
        for key in set(other) - {"time_discovered_started_ns", "time_discovered_completed_ns"}:
            assert type(mine[key]) is type(other[key]), key
        same = ("collective_seq_id", "p2p_seq_id", "is_p2p", "profiling_name", "timeout_ms")
        assert {k: mine[k] for k in same} == {k: other[k] for k in same}
        for key in ("op_id", "record_id"):
            assert mine[key] == other[key] + 1, key  # torch ran a barrier when it made the group on us
        assert mine["input_dtypes"] == other["input_dtypes"] and mine["output_dtypes"] == other["output_dtypes"]


@pytest.mark.parametrize("name, read", PAIRS[:2])
def test_torchs_own_function_has_our_entries(both, name, read):
    """Beside those that C++ recorded, in the order of time, or under the name of our backend."""
    ours, gloo, torchs = both["ours"][name], both["theirs"][name], both["ours"][f"torch's {name}"]
    alone = bool(torchs["which"])
    got, mine, others = (read(each["all"]) for each in (torchs, ours, gloo))
    keep = ("profiling_name", "state", "input_sizes", "op_id", "is_p2p", "process_group")  # Gloo retires some later
    times = [e["time_created_ns"] for e in got["entries"]]
    assert times == sorted(times)
    expected = [e for dump in ([mine] if alone else [others, mine]) for e in dump["entries"]]
    assert [{k: e[k] for k in keep} for e in got["entries"]] == [{k: e[k] for k in keep} for e in expected]
    assert {(e["state"], e["retired"]) for e in got["entries"][-len(mine["entries"]) :]} == {("completed", True)}
    numbers = [e["record_id"] for e in got["entries"]]
    assert len(set(numbers)) == len(numbers) and set(mine["pg_config"]) <= set(got["pg_config"])
    assert {str(e["pg_id"]) for e in got["entries"]} <= set(got["pg_status"])
    assert "entries" not in read(torchs["bare"]) and set(read(torchs["bare"])) == set(read(ours["bare"]))
    active = [] if alone else read(gloo["active"])["entries"]
    assert [e["op_id"] for e in read(torchs["active"]).get("entries", [])] == [e["op_id"] for e in active]


def test_call_sites(both):
    entries = pickle.loads(both["ours"]["_dump_fr_trace"]["all"])["entries"]
    for mine, other in zip(entries, pickle.loads(both["theirs"]["_dump_fr_trace"]["all"])["entries"], strict=True):
        (frame,) = mine["frames"]
        assert frame["filename"].endswith("test_trace_dumps.py")
        if mine["profiling_name"] == "gloo:barrier":
            continue  # a call that need not wait has the line of the first of its kind: that in torch's initialisation
        assert (frame["filename"], frame["line"]) in [(f["filename"], f["line"]) for f in other["frames"]]
    assert all("frames" not in e for e in pickle.loads(both["ours"]["no stacks"])["entries"])


@pytest.mark.parametrize("name, read", PAIRS)
def test_what_to_include(both, name, read):
    wanted, got = (read(both[side][name]["bare"]) for side in ("theirs", "ours"))
    assert set(got) == set(wanted) and "entries" not in got
    assert read(both["ours"][name]["active"]).get("entries", []) == []  # all have ended


def test_forgetting(both):
    assert pickle.loads(both["ours"]["forgotten"])["entries"] == []
    assert [e["profiling_name"] for e in pickle.loads(both["ours"]["after"])["entries"]] == ["gloo:barrier"]


def test_before_anything_ran():
    code = (
        "import pickle, symcomm.c10d as c; d = pickle.loads(c._dump_fr_trace()); c._reset_fr_recording_nccl(); print(d)"
    )
    out = loaded.run([sys.executable, "-c", code], timeout=60)
    assert "'entries': []" in out.stdout, out.stderr


def test_every_dtype_has_torchs_name():
    for dtype in DType:
        assert hasattr(torch, dtype.label)
        assert DTYPES[dtype.label]


# --- the real tool ---------------------------------------------------------------------------------------------------


def frtrace(folder: Path, *options: str) -> str:
    """What the real torchfrtrace says about the dumps in ``folder``."""
    code = "from torch.distributed.flight_recorder.fr_trace import main; main()"
    command = [sys.executable, "-c", code, str(folder), *options]
    done = loaded.run(command, timeout=100)
    if "name formatting error? gloo" in done.stderr:
        pytest.skip(
            "this torch's torchfrtrace reads dumps of NCCL and XCCL only; newer ones read Gloo's form, which is ours"
        )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def write_own(group, folder: str) -> None:
    trace = dump.note(group.global_ranks[group.rank], os.getpid(), group.arena.flight.address)
    dump.write(trace, os.path.join(folder, f"trace_rank_{trace.rank}"))


def happy(group, folder):
    t, size = torch.ones(6 * group.size), group.size
    group.all_reduce(t)
    group.all_gather_single(torch.empty(6 * size * size), t)
    group.all_gather([torch.empty(k + 1) for k in range(size)], torch.empty(group.rank + 1))
    group.reduce_scatter_single(torch.empty(6), t)
    group.gather([torch.empty(6 * size)] * size if group.rank == 0 else None, t)
    group.scatter(t, [torch.empty(6 * size)] * size if group.rank == 0 else None)
    group.all_to_all_single(torch.empty(6 * size), t)
    group.broadcast(t, 1)
    group.reduce(t, 1)
    group.barrier()
    turned = group.new_group(list(range(size))[::-1])
    turned.barrier()
    write_own(group, folder)


def test_torchfrtrace_finds_nothing_wrong(tmp_path):
    symcomm.spawn(happy, 3, (str(tmp_path),), mode="threads", deadline=60)
    out = frtrace(tmp_path, "-o", str(tmp_path / "db.pickle"))
    assert "has errors" not in out and "Not all ranks" not in out and "cannot decide" not in out, out
    _, db = pickle.loads((tmp_path / "db.pickle").read_bytes())
    assert all(c.pass_check for c in db.collectives)
    # ten calls, the exchange (lengths, then bytes) that makes the second group, its barrier
    assert len(db.collectives) == 13
    assert {(g.desc, g.size) for g in db.groups} == {("undefined", 3)}


def messages(group, folder):
    t = torch.ones(5)
    group.barrier()
    for _ in range(2):
        if group.rank == 0:
            group.send(t, 1)
            group.recv(t, 1)
        else:
            group.recv(t, 0)
            group.send(t, 0)
    write_own(group, folder)


def test_torchfrtrace_pairs_and_prints_messages(tmp_path):
    symcomm.spawn(messages, 2, (str(tmp_path),), mode="threads", deadline=60)
    out = frtrace(tmp_path, "-o", str(tmp_path / "db.pickle"))
    assert "has errors" not in out and "Not all ranks" not in out, out
    _, db = pickle.loads((tmp_path / "db.pickle").read_bytes())
    assert [c.pass_check for c in db.collectives] == [True] * 5
    os.unlink(tmp_path / "db.pickle")
    out = frtrace(tmp_path, "-j")
    assert out.count("send(s=0 d=1") >= 2 and out.count("recv(s=0 d=1") >= 2, out


def disagree(group, folder):
    group.barrier()
    with pytest.raises(errors.CollectiveMismatchError):
        if group.rank == 2:
            group.broadcast(torch.ones(8), 0)
        else:
            group.all_reduce(torch.ones(8))
    write_own(group, folder)


def test_torchfrtrace_names_the_mismatch(tmp_path):
    symcomm.spawn(disagree, 3, (str(tmp_path),), mode="threads", deadline=60)
    out = frtrace(tmp_path)
    assert "Collective sequence number: 2 has errors" in out
    assert "Culprit rank 2" in out and "COLLECTIVE_TYPE_MISMATCH" in out and "test_trace_dumps.py" in out, out


def stay_away(group, folder):
    group.barrier()
    if group.rank != 1:
        with pytest.raises(errors.RankFailedError):
            group.all_reduce(torch.ones(8))
    else:
        group.destroy()
    write_own(group, folder)


def test_torchfrtrace_names_the_missing_rank(tmp_path):
    symcomm.spawn(stay_away, 3, (str(tmp_path),), mode="threads", deadline=60)
    out = frtrace(tmp_path)
    assert "Not all ranks joining collective, sequence number: 2" in out and "missing ranks: {1}" in out, out


def test_where_dumps_go(monkeypatch):
    for name in ("SYMCOMM_TRACE_DIR", *dump.PREFIXES, *dump.SWITCHES):
        monkeypatch.delenv(name, raising=False)
    assert dump.prefix_from_environment() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    assert dump.prefix_from_environment() == "/c/torch/comm_lib_trace_rank_"
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/x/old_")
    assert dump.prefix_from_environment() == "/x/old_"
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/x/new_")
    assert dump.prefix_from_environment() == "/x/new_"
    monkeypatch.setenv("TORCH_FR_DUMP_ON_TIMEOUT", "0")
    assert dump.prefix_from_environment() is None
    monkeypatch.setenv("SYMCOMM_TRACE_DIR", "/t")
    assert dump.prefix_from_environment() == "/t/trace_rank_"


# --- torch's own dumps -----------------------------------------------------------------------------------------------


def test_a_dump_that_torch_wrote(both, tmp_path):
    """What Gloo or NCCL recorded can be read too, as far as it goes."""
    from symcomm.observe.analysis.verdict import judge
    from symcomm.observe.recorder.trace import load

    dump = pickle.loads(both["theirs"]["_dump_fr_trace"]["all"])
    for entry in dump["entries"]:
        entry["retired"] = True  # torch marks that when it comes round to it
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump))
    trace = load(tmp_path)
    assert [op.call for op in trace.ranks[0].operations] == [
        "all_reduce", "broadcast", "all_gather", "barrier", "reduce", "gather", "scatter", "all_to_all",
    ]  # fmt: skip
    assert all(op.ranks == (0,) and op.dtype == "float32" for op in trace.ranks[0].operations if op.call != "barrier")
    assert judge(trace).sentence == "nothing went wrong: rank 0 made the same 8 calls (group 0), and all ended."
