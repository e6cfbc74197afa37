"""Whom the launcher's verdict names, when a rank ends before the one that made it fail."""

from __future__ import annotations

import signal

import pytest

from symcomm.launcher.verdict import RankEnd, find_cause

pytestmark = pytest.mark.without_torch


@pytest.mark.parametrize("named_fails", [True, False])
def test_a_rank_that_missed_another_gives_way_to_it(jobs, named_fails):
    """Rank 1 fails and says so, but ends after rank 0, which failed because of it."""
    script = f"""
        from symcomm.errors import RankFailedError
        if rank == 0:
            while not os.path.exists("pid-1"): time.sleep(0.01)
            raise RankFailedError(f"barrier failed on rank 0: rank 1 (pid {{open('pid-1').read()}}) left the group.")
        parent = os.getppid()
        peers = [int(p) for p in open(f"/proc/{{parent}}/task/{{parent}}/children").read().split()]
        pid_file("1", os.getpid())
        while not any(open(f"/proc/{{p}}/stat").read().rpartition(")")[2].split()[0] == "Z" for p in peers):
            time.sleep(0.001)
        if not {named_fails}: time.sleep(600)
        print("ValueError: no label", file=sys.stderr)
        os._exit(9)  # at once: the launcher does not wait long
    """
    result = jobs.run(script, "-n", "2")
    if named_fails:
        assert result.returncode == 9 and "rank 1 failed first: it exited with code 9" in result.stderr
        assert "stderr:\n    ValueError: no label\n  others: rank 0 also failed (exited with code 1)." in result.stderr
    else:
        assert result.returncode == 1 and "rank 0 failed first: it exited with code 1" in result.stderr
        assert "others: rank 1 stopped on SIGTERM." in result.stderr


@pytest.mark.parametrize(
    ("blames", "one_node", "cause"),
    [
        ({0: (1, 101), 1: (2, 102)}, True, 2),
        ({0: (1, 101), 1: (0, 100)}, True, 0),  # they blame each other
        ({0: (1, 101), 1: (2, 102), 2: (1, 101)}, True, 0),
        ({0: (0, 102)}, True, 2),  # a number in a part of the job
        ({0: (5, 102)}, False, 0),  # a pid of another node
        ({0: (3, 103)}, True, 0),  # it did not fail by itself
    ],
)
def test_blame_is_followed_to_its_end(blames, one_node, cause):
    ends = [RankEnd(rank, 100 + rank, 1, 1.0, after=signal.SIGTERM if rank == 3 else 0) for rank in range(4)]
    for prefix in ("", "[rank0]: "):  # torch's excepthook writes the second
        words = f"{prefix}symcomm.errors.RankFailedError: barrier failed on rank 0: "
        tails = {rank: ["ValueError: x"] for rank in range(4)}
        tails |= {r: [f"{words}rank {n} (pid {p}) left the group.", ""] for r, (n, p) in blames.items()}
        assert find_cause(ends[0], ends, tails.__getitem__, one_node).rank == cause
