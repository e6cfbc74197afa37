"""Finds out which ranks share a host, by what each says of itself and of the arenas that it has mapped.

For trials, SYMCOMM_HOST_ID makes ranks of one machine count as ranks of different hosts."""

from __future__ import annotations

import base64
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

from symcomm import errors

_thread = threading.local()


def pretend_host(name: str | None) -> None:
    """Let this thread's rank count as one of the host ``name``; None: of its real host."""
    _thread.host = name


def pretended_host() -> str:
    mine: str | None = getattr(_thread, "host", None)
    return mine if mine else os.environ.get("SYMCOMM_HOST_ID", "")


def network() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


SHORT = 8  # characters by which ranks tell arenas apart: 48 random bits


def short(nonces: Sequence[bytes]) -> str:
    """Nonces, each shortened to a few characters, joined."""
    return "".join(base64.b64encode(nonce[:6]).decode() for nonce in nonces)


def all_mapped(infos: Sequence[dict[str, Any]]) -> bool:
    """Whether every rank has mapped every arena; the same on all ranks."""
    everyone = {short([bytes.fromhex(info["nonce"])]) for info in infos}
    mapped = ([info["mapped"][i : i + SHORT] for i in range(0, len(info["mapped"]), SHORT)] for info in infos)
    return all(everyone.issubset(names) for names in mapped)


@functools.cache
def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def check_versions(infos: Sequence[dict[str, Any]]) -> None:
    """Refuse mixed versions: any two may write different things into each other's memory."""
    versions = [info.get("version", "an older version") for info in infos]
    other = next((r for r, version in enumerate(versions) if version != versions[0]), None)
    if other is not None:
        raise errors.ResourceError(
            f"rank 0 runs Symcomm {versions[0]} and rank {other} {versions[other]}; install one version for all ranks."
        )


def hosts_of(infos: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The ranks, by host, that should be able to share memory. Whether they can is proved later, by mapping it."""
    hosts = alike([_host_key(info) for info in infos])
    for ranks in hosts:
        first = infos[ranks[0]]
        for r in ranks:
            if infos[r]["uid"] != first["uid"]:
                raise errors.ResourceError(
                    f"rank {ranks[0]} runs as user id {first['uid']} and rank {r} as {infos[r]['uid']}; "
                    "start all ranks as one user."
                )
    return sorted(part for ranks in hosts for part in _without_names(infos, ranks))


def _without_names(infos: Sequence[dict[str, Any]], ranks: list[int]) -> list[list[int]]:
    """Parts of one host's ``ranks`` that can map each other's arenas. If an arena has lost its name, ranks that have
    not mapped it need its descriptor, which only ranks in one network namespace can pass."""
    some = [infos[r] for r in ranks]
    if all(c["path"] for c in some) or all(c["net"] == some[0]["net"] for c in some) or all_mapped(some):
        return [ranks]
    first = [next(o for o in some if o["net"] == c["net"] or all_mapped([o, c])) for c in some]
    return [[ranks[i] for i in part] for part in alike([c["nonce"] for c in first])]


def _host_key(info: dict[str, Any]) -> tuple[str, ...]:
    """Equal for ranks that should be able to map each other's memory."""
    named = info.get("named", bool(info["path"]))
    return info.get("host_id", ""), info["boot"], "" if named else info["net"]


def alike(keys: Sequence[Any]) -> list[list[int]]:
    """Positions of equal keys, in order of first occurrence."""
    found: dict[Any, list[int]] = {}
    for position, key in enumerate(keys):
        found.setdefault(key, []).append(position)
    return list(found.values())
