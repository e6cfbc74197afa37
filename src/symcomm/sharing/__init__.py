"""Memory that one process of a host writes and others read, ranks of a group or not.

region.py has what queues and boards share: the memory, who reads it, and who is gone. door.py gives it to processes
that know a name, messages.py turns objects into bytes and buffers. queue.py: messages, each for all readers. board.py:
the newest version of a state, mapped and not copied.
"""
