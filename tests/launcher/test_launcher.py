"""The launcher, with real processes: what ranks see, what we see of them, and that none is ever left behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections import Counter
from pathlib import Path

import pytest

from symcomm.launcher.job import Job, reserve_port
from symcomm.launcher.launch import launch
from symcomm.launcher.output import Output
from symcomm.observe.recorder.processes import is_running
from tests.support.jobs import DEADLINE, environ

pytestmark = [pytest.mark.without_torch, pytest.mark.long]

# --- what a rank sees ----------------------------------------------------------------------------

DUMP = "print(json.dumps(dict(os.environ)))"


def dumped(result: subprocess.CompletedProcess) -> list[dict[str, str]]:
    assert result.returncode == 0, result.stderr
    lines = [line[line.index("{") :] for line in result.stdout.splitlines()]
    return sorted(map(json.loads, lines), key=lambda env: int(env["RANK"]))


def test_environment_is_torchruns(jobs):
    """The same variables, apart from the differences listed here, each for a reason."""
    pytest.importorskip("torch")
    ours = dumped(jobs.run(DUMP, "-n", "1"))[0]
    torchrun = jobs.start("--standalone", "--nproc-per-node", "1", "script.py", prefix=("-m", "torch.distributed.run"))
    theirs = dumped(jobs.finish(torchrun))[0]
    before = environ()
    set_by_us = {key for key in ours if ours[key] != before.get(key)}
    set_by_them = {key for key in theirs if theirs[key] != before.get(key)}
    assert set_by_them - set_by_us == {
        "TORCHELASTIC_USE_AGENT_STORE",  # rank 0 hosts our store, as it does without any launcher
        "TORCHELASTIC_ERROR_FILE",  # the verdict reads stderr instead
        "TORCHELASTIC_SIGNALS_TO_HANDLE",  # for torchrun's own agent
    }
    assert set_by_us - set_by_them == {
        "SYMCOMM_LAUNCH_ID",  # by which the launcher finds what ranks leave behind
        "SYMCOMM_TOKEN",  # by which ranks know each other
        "PYTHONUNBUFFERED",  # lines are shown when they are written
        "OMP_NUM_THREADS",  # torchrun sets it from two ranks on, always to 1
    }
    differing = {key for key in set_by_us & set_by_them if ours[key] != theirs[key]}
    assert differing <= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    assert ours["MASTER_ADDR"] == "127.0.0.1"  # needs no resolver


def test_every_rank_knows_who_it_is(jobs):
    ranks = dumped(jobs.run(DUMP, "-n", "3", "--env", "A=b=c", "--env", "EMPTY=", "--max-restarts", "2", "--tag", "t"))
    for rank, env in enumerate(ranks):
        assert env["RANK"] == env["LOCAL_RANK"] == env["ROLE_RANK"] == str(rank)
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == env["ROLE_WORLD_SIZE"] == "3"
        assert env["GROUP_RANK"] == "0" and env["GROUP_WORLD_SIZE"] == "1"
        assert env["TORCHELASTIC_RESTART_COUNT"] == "0" and env["TORCHELASTIC_MAX_RESTARTS"] == "2"
        assert env["TORCHELASTIC_RUN_ID"] == "t"
        assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
        assert env["A"] == "b=c" and env["EMPTY"] == ""
    assert len({env["MASTER_PORT"] for env in ranks}) == 1


def test_variables_of_the_user_win_and_those_of_an_outer_torchrun_do_not(jobs):
    env = {"OMP_NUM_THREADS": "7", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "5", "WORLD_SIZE": "9"}
    (rank,) = dumped(jobs.run(DUMP, **env))
    assert rank["OMP_NUM_THREADS"] == "7" and rank["RANK"] == "0" and rank["WORLD_SIZE"] == "1"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in rank


def test_same_script_under_torchrun_and_symcomm(jobs):
    pytest.importorskip("torch")
    script = jobs.write("""
        import sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        values = torch.full((3,), dist.get_rank() + 1)
        dist.all_reduce(values)
        print(f"sum={values.tolist()} of={dist.get_world_size()} args={sys.argv[1:]}\\n", end="")
        dist.destroy_process_group()
    """)
    args = ("-n", "2", script, "--lr", "3")
    ours = jobs.finish(jobs.start("--no-prefix", *args))
    torchrun_args = ("--standalone", "--nproc-per-node", *args[1:])
    theirs = jobs.finish(jobs.start(*torchrun_args, prefix=("-m", "torch.distributed.run")))
    expected = ["sum=[3, 3, 3] of=2 args=['--lr', '3']"] * 2
    assert ours.returncode == theirs.returncode == 0, ours.stderr + theirs.stderr
    assert ours.stdout.splitlines() == theirs.stdout.splitlines() == expected


# --- what we see of the ranks --------------------------------------------------------------------


def test_no_line_is_lost_and_order_is_kept(jobs):
    """10,000 lines from 4 ranks, on both streams, the last one without a newline."""
    script = """
        for i in range(1249):
            print(f"o {i} " + "x" * (i % 97), flush=i % 5 == 0)
            print(f"e {i}", file=sys.stderr)
        print("o last", end=""); sys.stdout.flush(); print("e last", end="", file=sys.stderr)
    """
    result = jobs.run(script, "-n", "4", "--log-dir", "logs")
    assert result.returncode == 0
    for rank in range(4):
        for text, letter, suffix in ((result.stdout, "o", "out"), (result.stderr, "e", "err")):
            lines = re.findall(rf"^\[rank {rank}\] (.*)$", text, re.M)
            assert [line.split()[1] for line in lines] == [*map(str, range(1249)), "last"]
            raw = (jobs.path / f"logs/attempt-0/rank-{rank}.{suffix}").read_text()
            assert raw.splitlines() == lines and raw.endswith(f"{letter} last")
    assert len(result.stdout.splitlines()) + len(result.stderr.splitlines()) == 10_000


def test_bytes_that_are_not_text_and_very_long_lines(jobs):
    script = r"""
        os.write(1, b"caf\xc3\xa9 \xff\xfe\n" + b"x" * 3_000_000 + b"\nend")
    """
    process = jobs.start(jobs.write(script))
    process.stdout.reconfigure(errors="surrogateescape")
    result = jobs.finish(process)
    lines = [line.removeprefix("[rank 0] ") for line in result.stdout.split("\n")]
    assert lines[0].encode(errors="surrogateescape") == b"caf\xc3\xa9 \xff\xfe"
    assert "".join(lines[1:-2]) == "x" * 3_000_000 and lines[-2:] == ["end", ""]


def test_tag_color_and_quiet(jobs):
    script = "print('out'); sys.exit('why')"
    tagged = jobs.run(script, "--tag", "night", "--color", "--log-dir", "logs")
    assert tagged.stdout == "\x1b[36m[night rank 0]\x1b[0m out\n"
    assert (jobs.path / "logs/night/attempt-0/rank-0.err").read_text() == "why\n"
    assert "rank-0.out, .err" in tagged.stderr
    quiet = jobs.run(script, "--quiet")
    assert quiet.stdout == "" and quiet.stderr.startswith("symcomm run: rank 0 failed: it exited with code 1")
    plain = jobs.run(script, "--no-prefix", NO_COLOR="1")
    assert plain.stdout == "out\n" and "\x1b" not in plain.stderr


def test_full_disk_ends_the_log_and_not_the_job(jobs):
    (jobs.path / "logs/attempt-0").mkdir(parents=True)
    (jobs.path / "logs/attempt-0/rank-0.out").symlink_to("/dev/full")
    result = jobs.run("print('one'); print('two')", "--log-dir", "logs")
    assert (result.returncode, result.stdout) == (0, "[rank 0] one\n[rank 0] two\n")
    assert result.stderr == "symcomm run: logs/attempt-0/rank-0.out ends here: No space left on device.\n"


def test_reader_that_goes_away_ends_the_job(jobs):
    script = "pid_file(f'{rank}', os.getpid())\nwhile True: print('y' * 1000)"
    process = jobs.start("-n", "2", jobs.write(script))
    jobs.wait_for("pid-0", "pid-1")
    process.stdout.close()
    process.stdout = None
    result = jobs.finish(process)
    assert result.returncode == 128 + signal.SIGPIPE and "stopped by SIGPIPE" in result.stderr
    jobs.assert_all_gone()


# --- how a job ends ------------------------------------------------------------------------------


def test_verdict_names_the_rank_that_failed_first(jobs):
    script = """
pid_file(f"{rank}", os.getpid())
if rank == 3:
    sys.exit(0)
while not all(os.path.exists(f"pid-{r}") for r in range(4)):
    time.sleep(0.01)
if rank == 2:
    while open(f"/proc/{open('pid-3').read()}/stat").read().split()[2] != "Z":  # until rank 3 has ended
        time.sleep(0.01)
    for i in range(20):
        print("line", i, file=sys.stderr)
    raise SystemExit(42)
time.sleep(600)
"""
    result = jobs.run(script, "-n", "4")
    assert result.returncode == 42
    verdict = result.stderr[result.stderr.index("symcomm run:") :].splitlines()
    assert re.fullmatch(
        r"symcomm run: rank 2 failed first: it exited with code 42 after [\d.]+ m?s \(pid \d+\)\.", verdict[0]
    )
    assert verdict[1:] == [
        "  its last lines on stderr:",
        *(f"    line {i}" for i in range(10, 20)),
        "  others: ranks 0, 1 stopped on SIGTERM; rank 3 had finished.",
    ]
    jobs.assert_all_gone()


def test_verdict_shows_the_users_frames(jobs):
    script = """
        import symcomm
        symcomm.init()

        def step():
            symcomm.all_gather_object(lambda: 0)

        pid_file(f"{rank}", os.getpid())
        if rank == 1:
            step()
        time.sleep(600)
    """
    result = jobs.run(script, "-n", "2")
    verdict = result.stderr[result.stderr.index("symcomm run:") :]
    shown = re.findall(r'File ".*/(.+)", line \d+, in (\S+)', verdict)
    assert [where for _, where in shown] == ["<module>", "step"], verdict
    assert "symcomm.all_gather_object(lambda: 0)" in verdict and "AttributeError: " in verdict
    jobs.assert_all_gone()


@pytest.mark.parametrize("signum", [signal.SIGSEGV, signal.SIGKILL])
def test_verdict_of_a_death_by_signal(jobs, signum):
    script = f"""
        if rank == 1: os.kill(os.getpid(), {int(signum)})
        time.sleep(600)
    """
    result = jobs.run(script, "-n", "2")
    assert result.returncode == 128 + signum
    assert f"rank 1 failed first: it died with {signum.name}" in result.stderr
    assert "hint: " in result.stderr and "it wrote nothing to stderr" in result.stderr
    assert "others: rank 0 stopped on SIGTERM." in result.stderr


def test_first_is_first_even_when_the_launcher_slept(jobs):
    """Two ranks die while the launcher cannot run: it still learns in which order."""
    process = jobs.start("-n", "3", jobs.write("pid_file(f'{rank}', os.getpid()); time.sleep(600)"))
    jobs.wait_for("pid-0", "pid-1", "pid-2")
    process.send_signal(signal.SIGSTOP)
    for rank in (2, 0):
        pid = int((jobs.path / f"pid-{rank}").read_text())
        os.kill(pid, signal.SIGKILL)
        while is_running(pid):
            time.sleep(0.001)
    process.send_signal(signal.SIGCONT)
    result = jobs.finish(process)
    assert "rank 2 failed first: it died with SIGKILL" in result.stderr
    assert "others: rank 0 also failed (died with SIGKILL); rank 1 stopped on SIGTERM." in result.stderr


def test_others_that_fail_too_are_mentioned(jobs):
    script = """
if rank == 0:
    while not os.path.exists("pid-1"): time.sleep(0.01)
    os._exit(5)
pid_file("1", os.getpid())
parent = os.getppid()
# what a broken wait looks like: the peer's death is noticed, and this rank fails because of it
peer = [p for p in map(int, open(f"/proc/{parent}/task/{parent}/children").read().split())]
while sum(open(f"/proc/{p}/stat").read().rpartition(")")[2].split()[0] == "Z" for p in peer) == 0: time.sleep(0.001)
os._exit(6)
"""
    result = jobs.run(script, "-n", "2")
    assert result.returncode == 5
    assert "rank 0 failed first: it exited with code 5" in result.stderr
    assert "others: rank 1 also failed (exited with code 6)." in result.stderr


def test_rank_that_ignores_sigterm_is_killed_after_the_grace(jobs):
    script = """
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: print("not me", flush=True))
    pid_file("0", os.getpid())
    while True: time.sleep(1)
while not os.path.exists("pid-0"): time.sleep(0.01)
sys.exit(9)
"""
    result = jobs.run(script, "-n", "2", "--grace", "0.5")
    assert result.returncode == 9 and "[rank 0] not me" in result.stdout
    assert "others: rank 0 had to be killed (grace 500 ms)." in result.stderr
    jobs.assert_all_gone()


# A child in the rank's process group that ignores SIGTERM, and one that moved to a session of its own.
FAMILY = """
stubborn = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
same = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
away = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True)
same.stdout.readline(), away.stdout.readline()
pid_file(f"{rank}", os.getpid()); pid_file(f"{rank}-same", same.pid); pid_file(f"{rank}-away", away.pid)
"""


@pytest.mark.parametrize("end", ["sys.exit(3)", "pass"])
def test_grandchildren_go_with_the_job(jobs, end):
    result = jobs.run(FAMILY + end.replace("pass", "os._exit(0)"), "-n", "2", "--grace", "0.5")
    assert result.returncode == (0 if end == "pass" else 3)
    assert "killed what ranks had left behind: python" in result.stderr
    assert len(jobs.pids()) >= 3
    jobs.assert_all_gone()


def test_launcher_killed_with_sigkill_leaves_nothing(jobs):
    process = jobs.start("-n", "2", jobs.write(FAMILY + "time.sleep(600)"))
    jobs.wait_for(*(f"pid-{rank}{who}" for rank in range(2) for who in ("", "-same", "-away")))
    process.kill()
    process.wait(DEADLINE)
    jobs.assert_all_gone()


def test_a_job_inside_a_job_goes_with_it(jobs):
    jobs.write(FAMILY + "time.sleep(600)", "inner.py")
    outer = "import os, sys; os.execv(sys.executable, [sys.executable, *'-m symcomm run -n 1 inner.py'.split()])"
    process = jobs.start(jobs.write(outer))
    jobs.wait_for("pid-0", "pid-0-same", "pid-0-away")
    process.kill()
    process.wait(DEADLINE)
    jobs.assert_all_gone()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kernel", ["5.3 or later", "older"])
def test_launch_without_a_command_line(tmp_path, monkeypatch, kernel):
    """Returns the code, gives the program its signal handlers back, and leaves no process or descriptor."""

    def no_pidfd(_pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if kernel == "older":
        monkeypatch.setattr(os, "pidfd_open", no_pidfd)

    def state() -> tuple[set[str], set[str]]:
        children = [Path(f"/proc/self/task/{task}/children").read_text() for task in os.listdir("/proc/self/task")]
        return set(os.listdir("/proc/self/fd")), set(" ".join(children).split())

    handler, before = signal.getsignal(signal.SIGINT), state()
    with open(tmp_path / "out", "wb") as out:
        output = Output(out=out.fileno(), err=out.fileno())
        code = launch(Job(command=["sh", "-c", "echo $RANK; exit $((RANK * 7))"], ranks_here=2), output)
    text = (tmp_path / "out").read_text()
    assert code == 7 and "[rank 1] 1\n" in text and "rank 1 failed first: it exited with code 7" in text
    assert signal.getsignal(signal.SIGINT) is handler
    for now, then in zip(state(), before, strict=True):  # what other tests left may go meanwhile
        assert now <= then


# --- signals to the launcher ---------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signals_reach_every_rank(jobs, signum):
    script = "pid_file(f'{rank}', os.getpid()); time.sleep(600)"
    process = jobs.start("-n", "2", "--max-restarts", "3", jobs.write(script))
    jobs.wait_for("pid-0", "pid-1")
    process.send_signal(signum)
    result = jobs.finish(process)
    assert result.returncode == 128 + signum
    assert f"symcomm run: stopped by {signum.name} after" in result.stderr
    assert f"ranks 0, 1 stopped on {signum.name}." in result.stderr and "restart" not in result.stderr
    jobs.assert_all_gone()


def test_ranks_that_handle_the_signal_decide_the_exit_code(jobs):
    script = """
def save(*_):
    print("saved", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, lambda *_: (print("usr1", flush=True), pid_file(f"{rank}-usr1", os.getpid())))
pid_file(f"{rank}", os.getpid())
while True: time.sleep(1)
"""
    process = jobs.start("-n", "2", jobs.write(script))
    jobs.wait_for("pid-0", "pid-1")
    process.send_signal(signal.SIGUSR1)
    jobs.wait_for("pid-0-usr1", "pid-1-usr1")
    process.send_signal(signal.SIGTERM)
    result = jobs.finish(process)
    assert result.returncode == 0, result.stderr
    assert Counter(result.stdout.split()) == {"[rank": 4, "0]": 2, "1]": 2, "usr1": 2, "saved": 2}


def test_second_interrupt_kills_at_once(jobs):
    script = """
signal.signal(signal.SIGINT, lambda *_: pid_file(f"{rank}-seen", os.getpid()))
pid_file(f"{rank}", os.getpid())
while True: time.sleep(1)
"""
    process = jobs.start("-n", "2", "--grace", "500", jobs.write(script))
    jobs.wait_for("pid-0", "pid-1")
    process.send_signal(signal.SIGINT)
    jobs.wait_for("pid-0-seen", "pid-1-seen")
    process.send_signal(signal.SIGINT)
    result = jobs.finish(process)
    assert result.returncode == 128 + signal.SIGKILL and "stopped by SIGINT" in result.stderr
    jobs.assert_all_gone()


def test_interrupt_after_a_failure_does_not_hide_the_failure(jobs):
    script = """
if rank == 1:
    while not os.path.exists("pid-0"): time.sleep(0.01)
    sys.exit("my fault")
signal.signal(signal.SIGTERM, lambda *_: pid_file("0-seen", os.getpid()))
pid_file("0", os.getpid())
while True: time.sleep(1)
"""
    process = jobs.start("-n", "2", "--grace", "500", jobs.write(script))
    jobs.wait_for("pid-0-seen")
    process.send_signal(signal.SIGINT)
    result = jobs.finish(process)
    assert result.returncode == 1 and "rank 1 failed first: it exited with code 1" in result.stderr
    assert "others: rank 0 stopped on SIGINT." in result.stderr


def test_terminal_interrupt_reaches_each_rank_once(jobs):
    """Ctrl-C on a real terminal: ranks have sessions of their own, so only what the launcher forwards arrives."""
    script = """
seen = []
def interrupted(*_):
    seen.append(1)
    if len(seen) == 1: signal.setitimer(signal.ITIMER_REAL, 0.3)
signal.signal(signal.SIGINT, interrupted)
signal.signal(signal.SIGALRM, lambda *_: (print("seen", len(seen)), os._exit(0)))
pid_file(f"{rank}", os.getpid())
while True: time.sleep(1)
"""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "symcomm", "run", "-n", "2", jobs.write(script)],
        cwd=jobs.path,
        env=environ(TERM="xterm"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),  # its own terminal
    )
    jobs.started.append(process)
    os.close(theirs)
    jobs.wait_for("pid-0", "pid-1")
    os.write(ours, b"\x03")
    assert process.wait(DEADLINE) == 0
    text = b""
    with contextlib.suppress(OSError):  # the terminal is gone when its last user is
        while data := os.read(ours, 4096):
            text += data
    os.close(ours)
    lines = sorted(line.removeprefix("^C") for line in text.decode().splitlines() if "seen" in line)
    assert lines == ["\x1b[33m[rank 1]\x1b[0m seen 1", "\x1b[36m[rank 0]\x1b[0m seen 1"]  # coloured: a terminal
    jobs.assert_all_gone()


# --- restarts and several nodes ------------------------------------------------------------------


def test_restarts_start_all_ranks_again(jobs):
    script = """
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt, "port", os.environ["MASTER_PORT"])
        if attempt == "2": sys.exit(0)
        if rank == 1: sys.exit("no luck")
        time.sleep(600)
    """
    result = jobs.run(script, "-n", "2", "--max-restarts", "3", "--log-dir", "logs")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("rank 1 failed first: it exited with code 1") == 2
    assert "restarting all ranks (restart 2 of 3)" in result.stderr and "restart 3 of 3" not in result.stderr
    seen = Counter(re.findall(r"attempt (\d)", result.stdout))
    assert seen["2"] == 2 and set(seen) == {"0", "1", "2"}
    assert {path.name for path in (jobs.path / "logs").iterdir()} == {"attempt-0", "attempt-1", "attempt-2"}


def test_restarts_run_out(jobs):
    result = jobs.run("raise SystemExit(4)", "--max-restarts", "1")
    assert result.returncode == 4 and result.stderr.count("rank 0 failed: it exited with code 4") == 2


def test_two_nodes_on_one_host_meet(jobs):
    """Rank 0 really listens at the endpoint, and every other rank of both nodes finds it there."""
    script = jobs.write("""
        world = int(os.environ["WORLD_SIZE"])
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if rank == 0:
            with socket.create_server(where) as server:
                who = sorted(int(server.accept()[0].recv(9)) for _ in range(world - 1))
            print("met", who)
        else:
            end = time.monotonic() + 50
            while time.monotonic() < end:
                try:
                    peer = socket.create_connection(where, timeout=5)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.02)
            peer.send(b"%d" % rank)
            peer.close()
        print(rank, os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], os.environ["GROUP_WORLD_SIZE"])
    """)
    with reserve_port() as holder:
        port = holder.getsockname()[1]
    common = ("-n", "2", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}")
    nodes = [jobs.start(*common, "--node-rank", str(node), script) for node in range(2)]
    results = [jobs.finish(node) for node in nodes]
    assert [result.returncode for result in results] == [0, 0], results
    assert "[rank 0] met [1, 2, 3]" in results[0].stdout
    assert "[rank 1] 1 1 0 2" in results[0].stdout
    assert sorted(results[1].stdout.splitlines()) == ["[rank 2] 2 0 1 2", "[rank 3] 3 1 1 2"]


def test_endpoint_in_use_is_said_before_anything_starts(jobs):
    with socket.create_server(("", 0)) as server:
        endpoint = f"localhost:{server.getsockname()[1]}"
        result = jobs.run("print('started')", "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", endpoint)
    assert result.returncode == 2 and result.stdout == ""
    assert re.fullmatch(r"symcomm run: port \d+ cannot be used on this host \(.*\); end .*\.\n", result.stderr)
