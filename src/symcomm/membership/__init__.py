"""Who is in a group: how ranks agree on that, whoever dies, stops or is cut off meanwhile.

Two agreements, since there are two questions; what is agreed in outlives any rank:

succession.py        who goes on: attempts, each without more ranks than the last, until one is decided
shared_board.py      on one host it is agreed in shared memory
quorum_board.py      across hosts in a register that a quorum of the members keeps (CASPaxos)
admission.py         who joins, who is next: those that were named, all of them or none; in one store
replicated_round.py  in the stores of three members, for groups without a store
newcomers.py         how newcomers and members find each other in a store
handles.py           how processes that serve small stores name themselves

Nothing here makes a group: what is agreed on is built by whoever calls, in group/ and hierarchical/.
"""
