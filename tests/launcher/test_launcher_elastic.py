"""`symcomm run` with ranks that are replaced one by one, and nodes that come and go."""

from __future__ import annotations

import re
import signal
import socket
import time

import pytest

from symcomm.errors import BadArgumentError
from symcomm.launcher.job import Job, find_placement, reserve_port
from tests.support.jobs import DEADLINE

pytestmark = pytest.mark.without_torch

# Ranks of a group that lose and gain others without any torch. A newcomer prints, too.
JOINING = """
import symcomm
def enter():
    return symcomm.join(timeout=40) if "SYMCOMM_JOIN" in os.environ else symcomm.init()
def say(*words):
    print(*words, flush=True)
def told(group):
    say("in a group of", group.size, group.global_ranks)
"""


def test_only_the_rank_that_failed_starts_again(jobs):
    """Rank 0 dies, and the store does not die with it: the launcher keeps it."""
    script = (
        JOINING
        + """
group = enter()
say("began", rank, os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"])
if "SYMCOMM_JOIN" not in os.environ:
    if rank == 0:
        sys.exit("out of luck")
    try:
        group.barrier()
    except symcomm.errors.RankFailedError:
        group = group.shrink().grow(wait=40, size=3)
group.barrier()
told(group)
"""
    )
    result = jobs.run(script, "-n", "3", "--max-restarts", "3", "--restart", "failed", "--log-dir", "logs")
    assert result.returncode == 0, result.stderr
    assert "rank 0 failed: it exited with code 1" in result.stderr and "    out of luck" in result.stderr
    assert "starting another rank 0 that joins the others (restart 1 of 3)." in result.stderr
    began = sorted(re.findall(r"\[rank (\d)\] began \1 (\d) 3", result.stdout))
    assert began == [("0", "0"), ("0", "1"), ("1", "0"), ("2", "0")]
    assert result.stdout.count("in a group of 3 [1, 2, 0]") == 3
    logs = {str(p.relative_to(jobs.path / "logs")) for p in (jobs.path / "logs").rglob("rank-*.out")}
    assert logs == {f"attempt-0/rank-{r}.out" for r in range(3)} | {"attempt-1/rank-0.out"}


def test_replacements_run_out(jobs):
    script = """
if rank == 0: time.sleep(600)
time.sleep(0.1); sys.exit(5)
"""
    result = jobs.run(script, "-n", "2", "--max-restarts", "2", "--restart", "failed", "--grace", "0")
    assert result.returncode == 5
    assert result.stderr.count("starting another rank 1") == 2 and "restarting all ranks" not in result.stderr
    assert "rank 1 failed first" in result.stderr


def test_when_none_is_left_to_join_all_start_again(jobs):
    script = """
sys.exit(0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and "SYMCOMM_JOIN" not in os.environ else 3)
"""
    result = jobs.run(script, "-n", "2", "--max-restarts", "2", "--restart", "failed")
    assert result.returncode == 0, result.stderr
    assert "restarting all ranks (restart 1 of 2)" in result.stderr and "starting another" not in result.stderr


FRESH_START = 'os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and "SYMCOMM_JOIN" not in os.environ'


@pytest.mark.parametrize("when", ["starting", "waiting"])
def test_members_that_die_before_a_newcomer_has_joined(jobs, when):
    """Rank 1 is replaced, and rank 0 dies before it lets the other in: nobody lives whom that one could join."""
    script = (
        JOINING
        + f"""
again, joins = {FRESH_START}, "SYMCOMM_JOIN" in os.environ
if joins:
    pid_file(f"came-{{rank}}", os.getpid())
    if {when == "starting"}: time.sleep(1.0)
group = enter()
if again:
    group.barrier()
    told(group)
    sys.exit()
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists("pid-came-1"): time.sleep(0.01)
if {when == "waiting"}: time.sleep(1.0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    result = jobs.run(script, "-n", "2", "--max-restarts", "2", "--restart", "failed", "--grace", "1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("in a group of 2 [0, 1]") == 2
    assert result.stderr.count("starting another rank 1 that joins the others (restart 1 of 2)") == 1
    assert "restarting all ranks (restart 2 of 2)" in result.stderr
    assert "no rank is left in a group that rank 1 could join" in result.stderr


@pytest.mark.parametrize("when", ["before", "meeting"])
def test_a_rank_that_dies_before_there_is_a_group(jobs, when):
    """The others wait for it in init(), and its replacement for them in join()."""
    script = (
        JOINING
        + f"""
if not {FRESH_START} and rank == 1 and "SYMCOMM_JOIN" not in os.environ:
    if {when == "meeting"}:
        from symcomm.store import handshake
        handshake._Attempt._exchange = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        enter()
    os.kill(os.getpid(), signal.SIGKILL)
group = enter()
group.barrier()
told(group)
"""
    )
    result = jobs.run(script, "-n", "3", "--max-restarts", "4", "--restart", "failed", "--grace", "1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("in a group of 3 [0, 1, 2]") == 3
    assert "restarting all ranks" in result.stderr


def test_a_newcomer_that_has_joined_is_somebody_to_join(jobs):
    """All that began are gone, and the job goes on without starting again: those that joined carry it on."""
    script = (
        JOINING
        + """
group, count = enter(), os.environ["TORCHELASTIC_RESTART_COUNT"]
def go_on():
    try:
        group.barrier()
        raise SystemExit("the other rank lives")
    except symcomm.errors.RankFailedError:
        if count == "1": time.sleep(1.5)  # for longer than the launcher takes to look
        return group.shrink().grow(wait=40, size=2)
if (count, rank) == ("0", 1): os.kill(os.getpid(), signal.SIGKILL)
if count == "0": group = go_on()
group.barrier()
if count == "0": os.kill(os.getpid(), signal.SIGKILL)
if count == "1":
    group = go_on()
    group.barrier()
told(group)
"""
    )
    result = jobs.run(script, "-n", "2", "--max-restarts", "2", "--restart", "failed", "--grace", "1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("in a group of 2 [1, 0]") == 2
    assert "restarting all ranks" not in result.stderr


# --- nodes -----------------------------------------------------------------------------------------


def free_endpoint() -> str:
    with reserve_port() as holder:
        return f"127.0.0.1:{holder.getsockname()[1]}"


def wait_for_listener(endpoint: str) -> None:
    host, port = endpoint.split(":")
    end = time.monotonic() + DEADLINE
    while True:
        try:
            return socket.create_connection((host, int(port)), 5).close()
        except ConnectionRefusedError:
            assert time.monotonic() < end, f"nobody listens at {endpoint}"
            time.sleep(0.02)


def test_a_node_comes_late_and_leaves(jobs):
    """Two launchers on one host: one starts alone, the other's ranks join, and go again when it is stopped."""
    script = jobs.write(
        JOINING
        + """
group = enter()
if "SYMCOMM_JOIN" not in os.environ:
    told(group)
    pid_file(f"begun-{rank}", os.getpid())
    group = group.grow(wait=40, size=4)
group.barrier()
told(group)
pid_file(f"grown-{rank}", os.getpid())
try:
    while True:
        time.sleep(0.02)
        group.barrier()
except symcomm.errors.RankFailedError:
    told(group.shrink())
"""
    )
    options = ("-n", "2", "--nnodes", "1:2", "--rdzv-endpoint", free_endpoint(), "--restart", "failed", script)
    first = jobs.start(*options)
    jobs.wait_for("pid-begun-0", "pid-begun-1")
    second = jobs.start(*options)
    jobs.wait_for(*(f"pid-grown-{rank}" for rank in range(4)))
    second.send_signal(signal.SIGTERM)
    stayed, left = jobs.finish(first), jobs.finish(second)
    assert left.returncode == 128 + signal.SIGTERM, left.stderr
    assert stayed.returncode == 0, stayed.stderr
    groups = re.findall(r"\[rank (\d)\] in a group of (\d) (\[.*\])", stayed.stdout)
    everyone = "[0, 1, 2, 3]"
    seen = [("2", "[0, 1]"), ("4", everyone), ("2", "[0, 1]")]
    assert sorted(groups) == sorted([(r, *one) for r in "01" for one in seen])


@pytest.mark.parametrize("where", ["in a group", "before there is one"])
def test_newcomers_of_all_nodes_wait_for_members_that_are_gone(jobs, where):
    """No launcher can tell that by its own ranks alone. Each has one rank, which is replaced all the same."""
    script = jobs.write(
        JOINING
        + f"""
count, joins = os.environ["TORCHELASTIC_RESTART_COUNT"], "SYMCOMM_JOIN" in os.environ
if count == "0" and {where == "before there is one"} and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
group = enter()
if count == "0":
    pid_file(f"began-{{rank}}", os.getpid())
    while not (os.path.exists("pid-began-0") and os.path.exists("pid-began-1")): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
group.barrier()
told(group)
"""
    )
    options = ("-n", "1", "--nnodes", "2:2", "--max-restarts", "3", "--restart", "failed", "--grace", "1")
    nodes = [jobs.start(*options, "--rdzv-endpoint", endpoint, script) for endpoint in [free_endpoint()] * 2]
    results = [jobs.finish(node) for node in nodes]
    assert [result.returncode for result in results] == [0, 0], [r.stderr for r in results]
    assert "".join(r.stdout for r in results).count("in a group of 2 [0, 1]") == 2
    assert all("no rank is left in a group that others could join" in r.stderr for r in results)


def test_too_few_nodes_are_left(jobs):
    script = jobs.write("pid_file(f'up-{rank}', os.getpid())\ntime.sleep(600)")
    endpoint = free_endpoint()
    options = ("--nnodes", "2:3", "--rdzv-endpoint", endpoint, script)
    first = jobs.start(*options)
    wait_for_listener(endpoint)
    second = jobs.start(*options)
    jobs.wait_for("pid-up-0", "pid-up-1")
    second.send_signal(signal.SIGTERM)
    result = jobs.finish(first)
    assert "1 of 2 nodes are left, less than --nnodes 2:3 allows" in result.stderr
    assert result.returncode == 1
    jobs.finish(second)
    jobs.assert_all_gone()


@pytest.mark.parametrize("failing", [False, True])
def test_all_start_again_when_a_node_comes_or_a_rank_fails(jobs, failing):
    """--restart all, as torchrun does: every change starts a new round with a new world."""
    script = jobs.write(f"""
failing = {failing}
world, count = os.environ["WORLD_SIZE"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("round", count, "rank", rank, "of", world, flush=True)
if world == "1": time.sleep(600)
if failing and rank == 1 and not os.path.exists("failed"):
    open("failed", "w"); sys.exit(7)
if failing and not (os.path.exists("failed") and count): time.sleep(600)
time.sleep(0.5)
""")
    options = ("--nnodes", "2:2" if failing else "1:2", "--max-restarts", "1", "--rdzv-endpoint", free_endpoint())
    nodes = [jobs.start(*options, script) for _ in range(2)]
    results = [jobs.finish(node) for node in nodes]
    assert [result.returncode for result in results] == [0, 0], [r.stderr for r in results]
    lines = "".join(r.stdout for r in results)
    assert "rank 0 of 2" in lines and "rank 1 of 2" in lines
    if failing:
        assert any("a rank of node 1 failed" in r.stderr for r in results)


def test_words_of_refusals():
    endpoint = ("h", 1)
    for job, words in (
        (Job(["x"], 1, nodes=2, min_nodes=3), "--nnodes must be MIN:MAX with 1 <= MIN <= MAX, got '3:2'"),
        (Job(["x"], 1, nodes=2, min_nodes=1), "--rdzv-endpoint is missing; with --nnodes 1:2"),
        (Job(["x"], 1, restart="some"), "--restart must be all or failed, got 'some'"),
        (Job(["x"], 1, nodes=2, endpoint=endpoint, restart="failed"), "--restart must be all with --nnodes 2"),
    ):
        with pytest.raises(BadArgumentError, match=re.escape(words)):
            job.check()
    with pytest.raises(BadArgumentError, match="--nnodes must be a number of 1 or more, auto, or MIN:MAX, got 'a:2'"):
        find_placement("a:2", None, None)
