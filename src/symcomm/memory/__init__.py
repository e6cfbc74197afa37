"""Memory that all ranks of a host have mapped.

heap.py     which parts of an arena are in use
numa.py     which part of the machine's memory is near to a rank
limits.py   how much memory there is, and who says so
arena.py    one rank's shared memory, and the view of other ranks' arenas
hosts.py    which ranks share a host
share.py    how ranks map each other's arenas, which proves it
"""
