"""Membership: ranks agree who is in a group, even if some die, stop or are cut off meanwhile.

There are two questions, so there are two agreements. Each is kept where it outlives any rank.

succession.py        who goes on: attempts, each leaving out more ranks than the last, until one is decided
shared_board.py      on one host, in shared memory
quorum_board.py      across hosts, in a register that a quorum of the members keeps (CASPaxos)
admission.py         who joins: the named processes, all of them or none; in one store
replicated_round.py  the same in the stores of three members, for groups without a store
newcomers.py         how newcomers and members find each other in a store
handles.py           how processes that serve small stores name themselves

Nothing here makes a group. The callers in group/ and hierarchical/ build the groups that were agreed on.
"""
