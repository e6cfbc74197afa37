"""Memory that all ranks of a host have mapped.

arena.py           one rank's shared memory, and the view of other ranks' arenas
heap.py            which parts of an arena are in use
flight.py          the flight recorder, in the arena's first pages
shared_heap.py     the part of an arena from which ordinary tensors are allocated
limits.py          how much memory is left, and which setting limits it
control_groups.py  the control groups of this process, and the processor time that they grant
numa.py            which part of the machine's memory is near a rank
hosts.py           which ranks should share a host
share.py           how ranks map each other's arenas, and prove that they do
"""
