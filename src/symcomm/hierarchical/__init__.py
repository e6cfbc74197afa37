"""Groups whose ranks are on several hosts.

A HierarchicalGroup is a ProcessGroup on each host, an engine between them, and a control channel on every rank.

topology.py     which ranks share a host, and which ranks of different hosts talk to each other
group.py        HierarchicalGroup: how it is built, ends, splits and shrinks
executor.py     runs its requests, one operation after another; each operation is eager or pipelined
eager.py        small tensors: data travels with the arrival messages of the hosts' leaders
pipelined.py    large tensors: symmetric memory on each host, the engine between hosts, in chunks
operation.py    one collective in progress: its deadline, synchronization and steps
intra_host.py   the ranks of one host, as a group of their own
presence.py     which ranks are still there
p2p.py          point-to-point calls; matcher.py: messages between hosts; message_works.py: their works
standoff.py     long waits for messages: asks the awaited ranks what they do
work.py         asynchronous operations
scratch.py      scratch buffers for operations
engines/base.py the transport between hosts, and the choice of one; torch_engine.py, mpi_engine.py beside it
control_channel.py small control messages between ranks, and peer liveness
listener.py     accepts connections to a control channel, until the peer has authenticated
session.py      authentication handshake and frame MACs of a connection
connection.py   a framed, authenticated connection; leader_links.py: the links between a group's leaders
frames.py       the schema of control messages, checked field by field
failure.py      one description of a failure, the same on every rank
connecting.py   deaths while a group is being made
shrink.py       building the group of the ranks that go on, which membership/ decides
"""
