"""A training step that hides communication behind computation.

A third of the computation is the forward pass and the rest the backward pass, which makes two products for each one of
the forward pass. Collectives run beside it, one after the other.

ddp    gradients are ready evenly over the backward pass, bucket by bucket; a bucket's all_reduce starts when it is full
       and the one before is done
fsdp   parameters are sharded. Each unit is all_gathered before its forward and again before its backward, one unit
       ahead; its gradients are reduce_scattered after its backward
"""

from __future__ import annotations

from dataclasses import dataclass

from symcomm.errors import bad_argument
from symcomm.simulate.predict import Cluster, compare

FORWARD = 1 / 3  # of the computation


@dataclass(frozen=True)
class Step:
    """One step. ``exposed``: communication that the computation does not hide."""

    kind: str
    ranks: int
    compute: float
    communication: float
    exposed: float
    collectives: int
    algorithm: str  # of the largest collective

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed

    @property
    def efficiency(self) -> float:
        """The part of the step that computes."""
        return self.compute / self.seconds if self.seconds else 1.0


def ddp_step(model_bytes: int, compute: float, bucket_bytes: int, cluster: Cluster, algorithm: str = "") -> Step:
    """``model_bytes``: all gradients. ``compute``: seconds of a step that communicates nothing.

    Raises: BadArgumentError."""
    _check(model_bytes, compute, bucket_bytes)
    sizes = _cut(model_bytes, bucket_bytes)
    costs, name = _costs("all_reduce", sizes, cluster, algorithm)
    forward, backward = compute * FORWARD, compute * (1 - FORWARD)
    done, filled = 0.0, 0
    for size, cost in zip(sizes, costs, strict=True):
        filled += size
        done = max(done, forward + backward * filled / model_bytes) + cost
    exposed = max(0.0, done - compute)
    return Step("ddp", cluster.ranks, compute, sum(costs), exposed, len(sizes), name)


def fsdp_step(model_bytes: int, compute: float, unit_bytes: int, cluster: Cluster, algorithm: str = "") -> Step:
    """``unit_bytes``: parameters that are gathered together, a layer or so.

    Raises: BadArgumentError."""
    _check(model_bytes, compute, unit_bytes)
    sizes = _cut(model_bytes, unit_bytes)
    gathers, name = _costs("all_gather", sizes, cluster, algorithm)
    scatters, _ = _costs("reduce_scatter", sizes, cluster, algorithm)
    network, computed, started = 0.0, 0.0, 0.0  # when the network and the computation are free; the last unit's start
    for size, gather in zip(sizes, gathers, strict=True):
        network = max(network, started) + gather  # one unit ahead: while the previous one computes
        started = max(computed, network)
        computed = started + compute * FORWARD * size / model_bytes
    ready = computed  # the last unit is still there from the forward pass
    for number in reversed(range(len(sizes))):
        started = max(computed, ready)
        if number:
            ready = network = max(network, started) + gathers[number - 1]
        computed = started + compute * (1 - FORWARD) * sizes[number] / model_bytes
        network = max(network, computed) + scatters[number]
    communication = sum(gathers) + sum(gathers[:-1]) + sum(scatters)
    exposed = network - compute
    return Step("fsdp", cluster.ranks, compute, communication, exposed, 3 * len(sizes) - 1, name)


def _cut(total: int, piece: int) -> list[int]:
    whole, rest = divmod(total, piece)
    return [piece] * whole + ([rest] if rest else [])


def _costs(collective: str, sizes: list[int], cluster: Cluster, algorithm: str) -> tuple[list[float], str]:
    """Seconds of each, by the algorithm asked for, or else the fastest."""
    known = {}
    for size in set(sizes):
        found = [e for e in compare(collective, size, cluster) if algorithm in ("", e.algorithm)]
        if not found:
            raise bad_argument("simulate", "algorithm", algorithm, f"one that {collective} has")
        known[size] = min(found, key=lambda e: e.seconds)
    return [known[size].seconds for size in sizes], known[max(sizes)].algorithm


def _check(model_bytes: int, compute: float, piece_bytes: int) -> None:
    for name, value in (("model_bytes", model_bytes), ("bucket_bytes", piece_bytes)):
        if not isinstance(value, int) or value < 1:
            raise bad_argument("simulate", name, value, "1 or more")
    if not compute >= 0:
        raise bad_argument("simulate", "compute", compute, "0 or more seconds")
