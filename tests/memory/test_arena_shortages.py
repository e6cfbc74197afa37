"""Named memory on a small file system: what is full is an error where memory is asked for, and never a signal later."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from symcomm import errors
from symcomm.group.default import join_ranks
from symcomm.group.factory import make_group
from symcomm.memory import arena as arena_module
from symcomm.store import FileStore
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.without_torch

SMALL = 16 << 20


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A tmpfs of 16 MiB, as /dev/shm of a container has 64."""
    path = tmp_path / "shm"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "none", str(path)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting needs root")
    monkeypatch.setenv("SYMCOMM_SHARE", "named")
    monkeypatch.setenv("SYMCOMM_SHM_DIR", str(path))
    yield str(path)
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(folder: str) -> None:
    """Take all that is left."""
    descriptor, taken = os.open(os.path.join(folder, "filler"), os.O_CREAT | os.O_RDWR), 0
    for piece in (1 << 20, 4096):
        try:
            while True:
                os.posix_fallocate(descriptor, taken, piece)
                taken += piece
        except OSError as error:
            assert error.errno == errno.ENOSPC
    os.close(descriptor)
    assert os.statvfs(folder).f_bavail == 0


def _use_when_full(rank: int, world: int, path: str, folder: str) -> list:
    make = partial(make_group, timeout=30.0)
    group = join_ranks(FileStore(path, world), rank, world, 30.0, make)
    if rank == 0:
        fill(folder)
    for _ in range(2100):  # more than the flight recorder holds
        group.barrier()
    small, large = np.full(100, rank, np.float32), np.full(1_000_000, rank, np.float32)
    for message in (small, large):
        group.send(message, 1) if rank == 0 else group.recv(message, 0)
        assert np.all(message == 0), "rank 0's"
    told = []
    for _ in range(2):
        try:
            group.all_reduce(large)
        except errors.ResourceError as error:
            told.append(str(error))
    group.barrier()
    try:
        group.split(0)
    except errors.SymcommError as error:
        told.append(str(error))
    return told


def test_a_mount_that_becomes_full_raises_where_memory_is_asked_for(small, tmp_path):
    for told in run_ranks(_use_when_full, 2, str(tmp_path / "store"), small, deadline=90):
        assert len(told) == 3, "both all_reduces and the new group"
        assert all("free space in" in text and "--shm-size" in text for text in told), told


def _join(rank: int, world: int, path: str) -> None:
    join_ranks(FileStore(path, world), rank, world, 20.0, partial(make_group, timeout=20.0))


@pytest.mark.parametrize("left", [0, 64 << 10, 1 << 20])
def test_a_mount_that_is_full_from_the_start(small, tmp_path, left):
    reserve = os.open(os.path.join(small, "reserve"), os.O_CREAT | os.O_RDWR)
    if left:
        os.posix_fallocate(reserve, 0, left)
    fill(small)
    os.unlink(os.path.join(small, "reserve"))
    os.close(reserve)
    for outcome in run_ranks(_join, 2, str(tmp_path / "store"), outcomes=True, deadline=60):
        assert outcome.kind == "raised" and isinstance(outcome.error, errors.SymcommError), outcome
        assert "--shm-size" in str(outcome.error), outcome
    assert [name for name in os.listdir(small) if name.startswith(arena_module.NAME)] == []
