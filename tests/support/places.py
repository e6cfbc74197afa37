"""Ranks of one group in any place: threads, processes, or pretended hosts."""

from __future__ import annotations

import tempfile

import torch

import symcomm
from tests.support.ranks import run_ranks

__all__ = ["join", "rank_main", "spawn", "sync"]


def spawn(fn, world: int, place="threads", *args):
    if place == "processes":
        with tempfile.TemporaryDirectory() as folder:
            return run_ranks(rank_main, world, f"{folder}/store", fn, args)
    hosts = list(place) if isinstance(place, tuple) else None
    return symcomm.spawn(fn, world, args, mode="threads", hosts=hosts, timeout=20, deadline=60)


def join(rank: int, world: int, path: str) -> symcomm.ProcessGroup:
    return symcomm.init(store=symcomm.FileStore(path, world), rank=rank, world_size=world, timeout=20)


def rank_main(rank, world, path, fn, args):
    torch.set_num_threads(1)
    group = join(rank, world, path)
    try:
        return fn(group, *args)
    finally:
        group.destroy()


def sync(window, group) -> None:
    """Wait for all ranks, by signals alone."""
    for rank in range(group.size):
        window.signal(rank)
    for rank in range(group.size):
        window.wait_signal(rank)
