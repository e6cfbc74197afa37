"""Memory that one process of a host writes and others read, ranks of a group or not.

queue.py     messages, each for all readers
board.py     the newest version of a state, which readers map and do not copy
ends.py      what the ends of both have in common
region.py    the memory, which processes read it, and which of them are gone
door.py      gives the memory to processes that know its name
messages.py  turns objects into bytes and buffers
"""
