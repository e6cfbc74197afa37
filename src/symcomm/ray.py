"""Ranks on a Ray cluster: ``symcomm.ray.run(fn, n)``, the way ``symcomm.spawn`` runs them on this machine.

Every rank is an actor in a bundle of one placement group. Rank 0 serves the store where they meet, at a port that the
kernel picks, behind a token that only this run knows. Then each calls ``fn(group, *args)``, with the group also as the
default one, and torchrun's variables set, so that torch.distributed finds the others too. An actor that dies, a rank
that raises, or a deadline ends the run on all of them.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from symcomm import errors

__all__ = ["run"]

CALL = "symcomm.ray.run"
GRACE = 5.0  # seconds that the other ranks get to end by themselves after one has failed
STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")


def run(
    fn: Callable[..., Any],
    n: int,
    args: tuple[Any, ...] = (),
    *,
    num_cpus: float = 1,
    num_gpus: float = 0,
    strategy: str = "PACK",
    timeout: float | None = None,
    deadline: float | None = None,
    start_deadline: float = 120.0,
    address: str | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``fn(group, *args)`` on ``n`` ranks and return their results in rank order.

    ``num_cpus`` and ``num_gpus`` are what each rank gets, ``strategy`` is how Ray spreads ranks over nodes
    (STRICT_PACK: all on one). ``timeout`` is the group's. ``start_deadline`` is how many seconds Ray may take to find
    room and to start the ranks; ``deadline`` is how many they may then take. ``env`` is set in every rank. Without
    ``ray.init()``, the cluster at ``address`` is joined, or the one Ray finds, or a local one is started.

    Raises: the first rank's error; BadArgumentError, RankFailedError, DeadlineError, ResourceError.
    """
    _check(n, strategy, num_cpus, num_gpus)
    ray = _load()
    if not ray.is_initialized():
        ray.init(address=address)
    end = time.monotonic() + start_deadline
    group = _place(ray, n, {"CPU": num_cpus, "GPU": num_gpus}, strategy, start_deadline)
    actors: list[Any] = []
    try:
        actors = _make(ray, n, group, num_cpus, num_gpus, env or {})
        token = secrets.token_urlsafe()
        store_port, ranks = _start(ray, actors, token, max(1.0, end - time.monotonic()))
        work = [
            actor.work.remote(fn, args, variables, store_port, token, timeout)
            for actor, variables in zip(actors, ranks, strict=True)
        ]
        return _collect(ray, work, deadline)
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)
        ray.util.remove_placement_group(group)


def _check(n: int, strategy: str, num_cpus: float, num_gpus: float) -> None:
    if not isinstance(n, int) or n < 1:
        raise errors.bad_argument(CALL, "n", n, "a positive number of ranks")
    if strategy not in STRATEGIES:
        raise errors.bad_argument(CALL, "strategy", strategy, f"one of {', '.join(STRATEGIES)}")
    for name, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
        if not value >= 0:
            raise errors.bad_argument(CALL, name, value, "0 or more")
    if not num_cpus + num_gpus:
        raise errors.bad_argument(CALL, "num_cpus", num_cpus, "more than 0 where num_gpus is 0")


def _load() -> Any:
    try:
        import ray
        import ray.util
    except ImportError:
        raise errors.ResourceError(f"{CALL}: Ray is not installed; run `pip install 'symcomm[ray]'`.") from None
    return ray


# --- starting --------------------------------------------------------------------------------------


def _place(ray: Any, n: int, bundle: dict[str, float], strategy: str, seconds: float) -> Any:
    """Room for all ranks, or an error that says what was asked for and what there is."""
    bundle = {name: amount for name, amount in bundle.items() if amount}
    group = ray.util.placement_group([bundle] * n, strategy=strategy)
    if group.wait(timeout_seconds=seconds):
        return group
    ray.util.remove_placement_group(group)
    free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
    raise errors.ResourceError(
        f"{CALL}: no room for {n} ranks of {_amounts(bundle)} each ({strategy}) within "
        f"{errors.format_seconds(seconds)}; the cluster has {_amounts(free)} free of "
        f"{_amounts({name: ray.cluster_resources().get(name, 0) for name in bundle})}."
    )


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "nothing"


def _make(ray: Any, n: int, group: Any, num_cpus: float, num_gpus: float, env: Mapping[str, str]) -> list[Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actor = ray.remote(_Rank)
    return [
        actor.options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=0,  # a rank that died has lost its memory: its job has to start again
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote(dict(env))
        for rank in range(n)
    ]


def _start(ray: Any, actors: list[Any], token: str, seconds: float) -> tuple[int, list[dict[str, str]]]:
    """Waits until all ranks run. Returns the port of rank 0's store, and each rank's variables, named as torchrun's."""
    n = len(actors)
    starts = [actor.start.remote(n, token if rank == 0 else None) for rank, actor in enumerate(actors)]
    _, late = ray.wait(starts, num_returns=n, timeout=seconds)
    if late:
        missing = [rank for rank, start in enumerate(starts) if start in late]
        raise errors.deadline(f"{CALL}: the start of {n} ranks", seconds, missing=missing)
    places: list[_RankInfo] = []
    for rank, start in enumerate(starts):
        try:
            places.append(ray.get(start))
        except ray.exceptions.RayError as error:
            raise _translated(ray, rank, error) from None
    nodes = [place.node for place in places]
    ranks = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_RANK": str(nodes[:rank].count(place.node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(place.node)),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(places[0].free_port),
        }
        for rank, place in enumerate(places)
    ]
    return places[0].store_port, ranks


class _RankInfo(NamedTuple):
    """Where a rank runs, and on rank 0 the port of the store and another for whoever asks the environment."""

    node: str
    address: str
    store_port: int = 0
    free_port: int = 0


class _Rank:
    """The actor: one rank. Ray makes a process of it."""

    def __init__(self, env: dict[str, str]) -> None:
        os.environ.update(env)  # before anything that fn needs is loaded
        self.store: Any = None

    def start(self, n: int, token: str | None) -> _RankInfo:
        """Answers once the process runs; with a token, on rank 0, it also serves the store where all meet."""
        import ray
        import ray.util

        from symcomm.store import TCPStore

        node, host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        if token is None:
            return _RankInfo(node, host)
        self.store = TCPStore(host, 0, n, is_master=True, wait_for_workers=False, token=token, bind=host)
        # MASTER_PORT is for a store that fn may start, such as torch's. Bound but not listening, the kernel gives it to
        # nobody else, and lets a server that sets SO_REUSEADDR have it.
        self.held = socket.socket()
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.held.bind(("", 0))
        return _RankInfo(node, host, self.store.port, self.held.getsockname()[1])

    def work(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        variables: dict[str, str],
        port: int,
        token: str,
        timeout: float | None,
    ) -> Any:
        """Join the others, call ``fn``, leave."""
        from symcomm.group import default
        from symcomm.store import TCPStore

        os.environ.update(variables)
        rank, n = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        if self.store is None:
            self.store = TCPStore(variables["MASTER_ADDR"], port, n, wait_for_workers=False, token=token)
        group = default.init(rank=rank, world_size=n, store=self.store, timeout=timeout)
        try:
            return fn(group, *args)
        finally:
            if default.is_initialized():
                default.destroy(group)


# --- ending ----------------------------------------------------------------------------------------


def _collect(ray: Any, work: list[Any], deadline: float | None) -> list[Any]:
    """Everybody's result; or the error that started it, once all have ended or had time to."""
    results: dict[int, Any] = {}
    failures: list[tuple[int, BaseException]] = []
    waiting = {reference: rank for rank, reference in enumerate(work)}
    end = None if deadline is None else time.monotonic() + deadline
    while waiting:
        left = None if end is None else max(0.0, end - time.monotonic())
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
        if not done:
            break
        rank = waiting.pop(done[0])
        try:
            results[rank] = ray.get(done[0])
        except ray.exceptions.RayError as error:
            failures.append((rank, _translated(ray, rank, error)))
            end = min(end or float("inf"), time.monotonic() + GRACE)
    if failures:
        raise _first_cause(failures) from None
    if waiting:
        raise errors.deadline(CALL, deadline or 0.0, missing=sorted(waiting.values()))
    return [results[rank] for rank in range(len(work))]


def _translated(ray: Any, rank: int, error: BaseException) -> BaseException:
    """What a rank raised, as it raised it; or that its process died."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, BaseException):
            if hasattr(cause, "add_note"):
                cause.add_note(f"(raised on rank {rank})\n{error}")  # which holds the rank's traceback
            return cause
        return errors.SymcommError(f"{CALL}: rank {rank} raised what cannot be sent here: {error}")
    if isinstance(error, ray.exceptions.RayActorError):
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "Ray does not say why")
        return _Died(f"{CALL}: rank {rank} died: {first}", [rank])
    return errors.SymcommError(f"{CALL}: rank {rank}: {type(error).__name__}: {error}")


class _Died(errors.RankFailedError):
    """A death that Ray saw itself. Callers catch it as RankFailedError."""


def _first_cause(failures: list[tuple[int, BaseException]]) -> BaseException:
    """What started it: what a rank raised by itself, else a death, else the first report that a peer failed."""

    def order(failure: tuple[int, BaseException]) -> int:
        error = failure[1]
        return 1 if isinstance(error, _Died) else 2 if isinstance(error, errors.PeerError) else 0

    return min(failures, key=order)[1]
