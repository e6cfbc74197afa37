"""Messages of a group across hosts.

Messages within a host use the mailboxes of the host's group; matcher.py has those between hosts.
"""

from __future__ import annotations

from typing import Any

from symcomm._core import native
from symcomm.group.p2p import ANY_SOURCE, Message, Messages
from symcomm.group.state import GroupState
from symcomm.hierarchical.frames import EAGER_MAX_BLOCKING
from symcomm.hierarchical.matcher import MessageMatcher
from symcomm.hierarchical.message_works import AnySourceWork, LocalWork, RemoteWork
from symcomm.hierarchical.topology import Layout

EAGER_MAX_NONBLOCKING = 4096  # bytes that travel with the envelope


class HierarchicalMessages(Messages):
    """``here``: the messages of this host's own group."""

    def __init__(self, state: GroupState, layout: Layout, here: Messages, matcher: MessageMatcher):
        super().__init__(state)
        self._layout, self._here, self._matcher = layout, here, matcher

    def post(self, message: Message, call: str, background: bool) -> Any:
        buffer, layout, matcher = self.view(message, call), self._layout, self._matcher
        is_here = layout.host_of.get(message.peer) == layout.host
        if is_here or message.peer == ANY_SOURCE:
            peer = layout.local_of[message.peer] if is_here else ANY_SOURCE
            local = self._here.post(Message(message.is_send, message.tensor, peer, message.tag), call, True)
            if is_here:
                return LocalWork(self.state.whole(), local, message)
            return matcher.receive(AnySourceWork(matcher, message, buffer, local))
        if message.is_send:
            return matcher.send(message, buffer, EAGER_MAX_NONBLOCKING if background else EAGER_MAX_BLOCKING)
        native.change_tensors(buffer.written)
        return matcher.receive(RemoteWork(matcher, message, buffer))

    @property
    def is_busy(self) -> bool:
        return self._here.is_busy
