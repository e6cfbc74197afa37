"""Groups whose ranks are on several hosts.

topology.py     which ranks share a host, and who of one host answers to whom of another
group.py        HostsGroup: how one comes to be, ends, splits and shrinks
calls.py        its collectives: tensors in, checked, handed to
pipelined.py    what happens to them: symmetric memory on each host, the engine between hosts, in chunks
operation.py    one collective on its way: its deadline, its meeting, its steps
p2p.py          point-to-point
work.py         asynchronous operations
scratch.py      memory that operations borrow
engines/base.py what carries bytes between hosts, and the choice of one; torch_engine.py, mpi_engine.py beside it
control_channel.py small messages between ranks, and who of them is gone
listener.py     where an office listens, and those who have not proved yet that they belong to the job
session.py      how both sides of a connection prove who they are, and sign what they send
connection.py   a connection: frames; leader_links.py: the connections by which a group's hosts meet
frames.py       what ranks may tell each other, field by field
failure.py      what went wrong, in words, the same on every rank
agreement.py    how ranks on several hosts agree without a store: survivors, members of a new group

A HostsGroup is a ProcessGroup on each host, an engine between them, and an office at every rank.
"""
