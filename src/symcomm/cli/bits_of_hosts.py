"""``symcomm bits --network``: ranks on network namespaces, which stand for hosts. As a program, one of these ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from symcomm import errors
from symcomm.bench.namespaces import Network, why_no_namespaces
from symcomm.bench.run import quiet

SILENT = 300.0  # seconds; each rank loads torch, on a machine that may be busy


@dataclass(frozen=True)
class Job:
    kinds: tuple[str, ...]
    training: bool


def hashes_on(hosts: int, ranks: int, kinds: Any, training: bool) -> dict[str, str]:
    """By kind, the hash that ``ranks`` ranks found, on so many hosts."""
    if why := why_no_namespaces():
        raise errors.ResourceError(why)
    with Network(hosts) as network:
        job = Job(tuple(kinds), training)
        found: list[dict[str, str]] = network.run_ranks(
            ranks // hosts, __name__, job, SILENT, quiet, dict, quiet, "symcomm bits --network"
        )
    return found[0]


def main() -> None:
    from symcomm.bench.torch_worker import read_plan, say
    from symcomm.cli.bits import SUMS, TRAINING, hashes_of
    from symcomm.group.default import destroy, init

    job = read_plan()
    group = init(timeout=SILENT)
    work = TRAINING if job["training"] else SUMS
    say([hashes_of(group.all_gather_object(work.on_rank(group, job["kinds"])), job["kinds"])])
    group.barrier()
    destroy()


if __name__ == "__main__":
    main()
