"""Point-to-point calls of a group across hosts.

Ranks of one host use the mailboxes of their ProcessGroup; hierarchical/matcher.py has the messages between hosts.
"""

from __future__ import annotations

from typing import Any

from symcomm._core import native
from symcomm.group.buffers import read_buffer, write_buffer
from symcomm.group.p2p import ANY_SOURCE, Message, MessageCalls
from symcomm.group.work import Timeout, to_ns
from symcomm.hierarchical.frames import EAGER_MAX_BLOCKING
from symcomm.hierarchical.matcher import MessageMatcher
from symcomm.hierarchical.message_works import AnySourceWork, LocalWork, RemoteWork

EAGER_MAX_NONBLOCKING = 4096  # bytes that travel with the envelope


class HierarchicalMessages(MessageCalls):
    """Mixed into HierarchicalGroup."""

    local: Any
    layout: Any
    matcher: MessageMatcher

    def send(self, tensor: Any, peer: int, tag: int = 0, timeout: Timeout = None) -> None:
        """Returns once ``tensor`` may be changed again."""
        if timeout is not None:
            to_ns("send", timeout)
        self._post(Message.send(tensor, peer, tag), "send", True, EAGER_MAX_BLOCKING).wait(timeout)

    def recv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0, timeout: Timeout = None) -> int:
        """Fill ``tensor`` from ``peer`` (or from whoever sends first); returns the sender's rank."""
        if timeout is not None:
            to_ns("recv", timeout)
        work = self._post(Message.receive(tensor, peer, tag), "recv", True)
        work.wait(timeout)
        return work.source

    def _post(self, message: Message, call: str, background: bool, eager_max: int = EAGER_MAX_NONBLOCKING) -> Any:
        self.check_usable()
        self._check_message(call, message)
        buffer = (read_buffer if message.is_send else write_buffer)(call, "tensor", message.tensor)
        here = self.layout.host_of.get(message.peer) == self.layout.host
        if here or message.peer == ANY_SOURCE:
            peer = self.layout.local_of[message.peer] if here else ANY_SOURCE
            local = self.local._post(Message(message.is_send, message.tensor, peer, message.tag), call, True)
            if here:
                return LocalWork(self, local, message)
            return self.matcher.receive(AnySourceWork(self.matcher, message, buffer, local))
        if message.is_send:
            return self.matcher.send(message, buffer, eager_max)
        native.change_tensors(buffer.written)
        return self.matcher.receive(RemoteWork(self.matcher, message, buffer))
