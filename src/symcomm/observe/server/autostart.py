"""Loaded by ``import symcomm`` when SYMCOMM_SERVER is set: a rank's server starts when the rank joins its first group.

Not before: helpers of a rank, such as data loaders and compilers, have the same environment but join nothing.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from symcomm.errors import BadArgumentError, SymcommError
from symcomm.group.hooks import on_end, on_join

if TYPE_CHECKING:
    from symcomm.observe.server.server import Server

_servers: dict[bytes, Server] = {}  # by the rank's arena


def _serve(group: Any, store: Any) -> None:
    from symcomm.observe.server.server import start_from_environment

    server = _servers.get(group.arena.nonce)
    if server is not None:
        if server.rank.group is None:  # the earlier one is gone; a sub-group never takes its place
            server.rank.join(group, store)
        return
    try:
        server = start_from_environment(group, store)
    except BadArgumentError:
        raise
    except SymcommError as error:
        warnings.warn(f"symcomm: rank {group.rank} goes on without a server: {error}")
    else:
        if server is not None:
            _servers[group.arena.nonce] = server


def _stop() -> None:
    for server in _servers.values():
        server.shutdown()


on_join.append(_serve)
on_end.append(_stop)
