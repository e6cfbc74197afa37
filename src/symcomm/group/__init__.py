"""Process groups.

process_group.py  ProcessGroup: the methods of users, and the parts that it owns
facade.py         the methods that CudaGroup shares: collectives and messages
state.py          what the parts share: rank, size, time-out, and whether the group can still be used
executor.py       LocalExecutor: runs requests, which request.py makes of checked arguments
p2p.py            LocalMessages
local.py          LocalGroup: ranks that share memory; how such a group is made and left
calibration.py    what `symcomm bench attach` found out about this machine
meeting.py        what ranks learn of each other before they make a group
factory.py        make_group(): ranks meet and make a LocalGroup, or a group across hosts (symcomm.hierarchical)
leaving.py        how a rank leaves, and what becomes of its part of the memory
object_calls.py, monitored_barrier.py, custom_plans.py  further calls
buffers.py        any tensor -> address, count, dtype
work.py           operations that run while the caller goes on; watcher.py runs their callbacks
chains.py         a call together with the callbacks of its works
shrink.py         the group of the ranks that go on, which membership/ decides
grow.py           the group with newcomers in it
reconfigure.py    ReconfigurableGroup: each reconfigure names its members anew
registry.py       groups by name
hooks.py          events for observers
call_hooks.py     hooks around calls, by interception.py; hook_classes.py has some that are ready to use
failure.py        finds out why an operation failed; failure_words.py has the sentences, for all executors
standoff.py       detects two ranks that wait for each other
default.py        init(), the default group and the functions on it
spawn.py          ranks from one Python function, as processes or threads
"""
