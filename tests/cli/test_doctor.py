"""`symcomm doctor`: each check on made-up machines, and the command on this one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from symcomm import torch_versions
from symcomm._core import native
from symcomm.cli.doctor import examine, exit_code
from symcomm.observe.health import FAIL, OK, WARN, Finding, machine, memory, network, run_checks, software

pytestmark = [
    pytest.mark.torch_versions,
    pytest.mark.without_torch,
    pytest.mark.long,
    pytest.mark.timeout(240),  # each examination starts two ranks that import torch
]
HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
SRC = Path(__file__).parents[2] / "src"


def doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "symcomm", "doctor", *arguments],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.fixture
def broken_torch(tmp_path: Path) -> str:
    """A PYTHONPATH on which torch fails at once: for tests of the doctor to which it does not matter."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    return f"{tmp_path}:{SRC}"


# --- the command ---------------------------------------------------------------------------------


def test_this_machine_as_json():
    done = doctor("--json", "-n", "2")
    found = json.loads(done.stdout)
    states = {f["check"]: f["state"] for f in found["findings"]}
    assert done.returncode == (0 if found["fit"] else 1)
    assert states["C core"] == states["collective"] == states["memfd"] == states["loopback"] == OK
    asked = {"cores", "cpu quota", "numa", "clock", "tick counter", "open files", "container", "host name", "gpus",
             "torch", "ptrace", "huge pages", "shared memory", "memory", "ports", "kernels", "attach"}  # fmt: skip
    assert asked <= set(states)
    if HAS_TORCH:
        told = {f["check"]: f["found"] for f in found["findings"]}
        assert states["torch group"] == OK
        assert told["torch group"] == "two ranks made a group through torch.distributed, twice"
        assert states["shared heap"] == OK
        assert all(version in told["torch"] for version in torch_versions.TESTED)
    assert all(f["fix"] for f in found["findings"] if f["state"] != OK), "whatever is wrong, there is advice"


def test_which_kernels_the_cpu_gets(monkeypatch):
    sets, chosen = native.reduce_sets()
    native.use_reduce_set(sets[-1])
    try:
        _, found = software.core()
        assert (found.check, found.state, found.found) == (
            "kernels",
            OK,
            f"{sets[-1]} (this CPU has {', '.join(sets)})",
        )
        monkeypatch.setattr(native, "reduce_sets", lambda: (("baseline", "better"), "baseline"))
        _, found = software.core()
        assert (found.state, found.found) == (WARN, "baseline (this CPU has baseline, better)")
        assert "SYMCOMM_KERNELS" in found.fix
    finally:
        native.use_reduce_set(chosen)


def test_kernels_that_the_cpu_does_not_have():
    ask = "from symcomm.observe.health import software; [found] = software.core(); print(found.state, found.found)"
    env = {**os.environ, "SYMCOMM_KERNELS": "mmx"}
    said = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, timeout=60).stdout
    assert said.startswith("fail SYMCOMM_KERNELS: the reduction kernels of this CPU are ")


def test_a_table_and_exit_codes(broken_torch):
    done = doctor(PYTHONPATH=broken_torch)
    lines = done.stdout.splitlines()  # of a pipe: nothing is broken, so that it can be searched and copied
    assert any(line.startswith("ok    C core") and line.endswith(native.__file__) for line in lines), done.stdout
    assert any(line.startswith("      ") and "what to change: " in line for line in lines)
    assert "host name" in done.stdout
    assert doctor("-n", "0").returncode == 2
    ok, warn, fail = (Finding("x", state, "") for state in (OK, WARN, FAIL))
    assert exit_code([ok, warn], strict=False) == 0 and exit_code([ok, warn], strict=True) == 1
    assert exit_code([ok, fail], strict=False) == 1 and exit_code([ok], strict=True) == 0


@needs_torch
def test_a_broken_torch_is_a_finding(broken_torch):
    """The command itself does not import torch: only the two ranks see that it is broken."""
    done = doctor("--json", PYTHONPATH=broken_torch)
    found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1 and found["collective"]["state"] == found["torch"]["state"] == OK
    assert found["torch group"]["state"] == FAIL and "ImportError: torch is broken" in found["torch group"]["found"]
    assert "pip install" in found["torch group"]["fix"]


def test_a_torch_that_hangs_does_not_keep_the_doctor(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{SRC}")
    monkeypatch.setattr(software, "RANKS_DEADLINE", 5.0)
    found = software.torch_group()
    assert (found.state, found.found) == (FAIL, "two ranks cannot use torch.distributed: not done after 5 s")
    assert not [p for p in psutil.Process().children(recursive=True) if "doctor_ranks" in " ".join(p.cmdline())]


def test_without_the_core(broken_torch):
    """A checkout that was not built: everything else is still checked, and the exit code says that it matters."""
    code = "import sys; sys.modules['symcomm._core._native'] = None; from symcomm.cli.main import main\n"
    code += "sys.argv = ['symcomm', 'doctor', '--json']; main()"
    env = {**os.environ, "PYTHONPATH": broken_torch}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    states = {f["check"]: (f["state"], f["fix"]) for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1 and states["C core"][0] == FAIL and "build_ext" in states["C core"][1]
    assert states["loopback"][0] == OK


def test_a_check_that_breaks_is_a_finding(broken_torch, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", broken_torch)

    def broken():
        raise KeyError("odd")

    (found,) = run_checks([("thing", broken)])
    assert found.state == WARN and "KeyError: 'odd'" in found.found
    assert len(examine(1)) > 15


# --- made-up machines ----------------------------------------------------------------------------


def test_slow_and_missing_names(monkeypatch):
    def slow(name, port):
        time.sleep(0.3)
        return [(2, 1, 6, "", ("10.0.0.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    found = network.host_name()
    assert found.state == WARN and "slow" in found.found and "/etc/hosts" in found.fix

    def unknown(name, port):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert network.host_name().state == WARN
    monkeypatch.setenv("MASTER_ADDR", "nowhere")
    assert network.meeting_place().state == FAIL
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: time.sleep(5) or [])
    took, addresses, problem = network.look_up("x", seconds=0.2)
    assert addresses is None and took < 4 and "no answer within 0.2 s" in problem


def test_too_few_cores_and_quota(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert machine.cores(2).state == OK and machine.cores(3).state == WARN
    monkeypatch.setattr(machine, "granted_cores", lambda: 1.5)
    assert machine.quota(None).state == WARN and "--cpus" in machine.quota(None).fix
    assert machine.quota(1).state == OK
    monkeypatch.setattr(machine, "granted_cores", lambda: None)
    assert machine.quota(None).state == OK


@pytest.mark.parametrize(("limit", "state"), [(1 << 16, OK), (200, WARN), (50, FAIL)])
def test_open_files(monkeypatch, limit, state):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, 1 << 20))
    found = machine.open_files(100)
    assert found.state == state and (state == OK or "ulimit -n 65536" in found.fix)


def test_small_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(
        memory.shutil, "disk_usage", lambda path: type("Room", (), {"free": 60 << 20, "total": 64 << 20})
    )
    assert memory.shared_directory().state == WARN and "--shm-size" in memory.shared_directory().fix
    monkeypatch.setattr(memory, "system_room", lambda: (100 << 20, "MemAvailable in /proc/meminfo"))
    assert memory.free_memory().state == WARN
    monkeypatch.setattr(memory, "cgroup_room", lambda: (50 << 20, "/sys/fs/cgroup/x/memory.max = 1 GiB"))
    assert "docker run --memory" in memory.free_memory().fix


def test_memfd_refused(monkeypatch):
    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    found = memory.memory_files()
    assert found.state == FAIL and "SYMCOMM_SHARE=named" in found.fix


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.13.0+cpu", OK), ("2.10.0", OK), ("2.15.3+cu132", OK), ("2.9.1", FAIL), ("1.13.1", FAIL),
     ("3.0.0a0+git1", WARN), ("2.16.0", WARN), ("unknown", WARN), (None, WARN)],
)  # fmt: skip
def test_versions_of_torch(monkeypatch, version, state):
    def told(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", told)
    monkeypatch.setattr(software, "run_two_ranks", lambda device: None)
    first = software.torch()[0]
    assert first.state == state and (state == OK or "pip install" in first.fix)


@pytest.mark.parametrize(
    ("lines", "state", "words"),
    [
        (["NVIDIA H200, Default, [N/A]"], OK, "1 (NVIDIA H200)"),
        (["NVIDIA A100, Default, Enabled"] * 2, WARN, "split (MIG)"),
        (["NVIDIA L4, Exclusive_Process, Disabled"], WARN, "exclusive"),
    ],
)
def test_gpus(lines, state, words):
    found = software.judge_gpus(lines)
    assert found.state == state and words in found.found


def test_an_nvidia_smi_that_fails(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = software.gpus()
    assert isinstance(found, Finding) and found.state == WARN and "NVIDIA-SMI has failed" in found.found


@needs_torch
def test_two_ranks_share_a_device():
    found = software.share_device("cpu")
    assert (found.state, found.found) == (OK, "two ranks summed a tensor on cpu")
    found = software.share_device("nonsense:0")
    assert (
        found.state == FAIL and "two ranks cannot share nonsense:0: " in found.found and "nonsense" in found.found[35:]
    )
