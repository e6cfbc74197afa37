"""A board's next version on several hosts: a broadcast from the memory of one board into that of the others."""

from __future__ import annotations

import contextlib
from typing import Any

from symcomm import errors
from symcomm.group.buffers import Buffer
from symcomm.group.process_group import ProcessGroup
from symcomm.group.refusal import Refusals
from symcomm.group.work import Timeout
from symcomm.memory.arena import bytes_type
from symcomm.sharing.board import Board
from symcomm.sharing.messages import Message
from symcomm.types import DType


class _Bytes:
    """Memory, as a tensor that groups take."""

    def __init__(self, at: int, nbytes: int):
        self.buffer = Buffer(at, nbytes, DType.UINT8, bytes_type(nbytes).from_address(at))


def relay(
    board: Board,
    group: ProcessGroup,
    state: Any = None,
    version: int | None = None,
    root: int = 0,
    timeout: Timeout = None,
) -> int:
    """Rank ``root``'s ``state`` becomes the newest version of the boards of all ranks, one on each host. All of
    ``group`` call it; what others than the root give as ``state`` and ``version`` is not looked at.

    The state is copied once, into the root's board. From there it is sent into the memory of the others, whose readers
    see it once all of it is there. If that fails, every board still shows the version before.

    Raises: as ``Board.publish`` and ``ProcessGroup.broadcast``. What one rank refuses is a CallRefusedError of the
    others."""
    message, number = None, 0
    with Refusals(group):
        if not isinstance(board, Board):
            raise errors.wrong_type("relay", "board", type(board).__name__, "a symcomm.Board")
        if group.rank == root:
            number = board.next_version("relay", version)
            message = Message((number, state), in_part=True)
    number, nbytes = group.broadcast_object((number, message.nbytes) if message else None, root, timeout)
    with contextlib.ExitStack() as stack:
        with Refusals(group):
            at = stack.enter_context(board.draft(nbytes, board.next_version("relay", number), "relay"))
            if message:
                message.write(at)
        group.broadcast(_Bytes(at, nbytes), root, timeout=timeout)
    return number
