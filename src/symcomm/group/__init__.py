"""Process groups.

process_group.py  ProcessGroup: the methods of users, and the parts that it owns
facade.py         those of them that CudaGroup has, too: collectives and messages
state.py          what the parts share: rank, size, time-out, and whether the group can still be used
executor.py       LocalExecutor: runs requests, which request.py makes of checked arguments
p2p.py            LocalMessages
local.py          LocalGroup: one whose ranks share memory: how it is made and left
calibration.py    what `symcomm bench attach` found out about this machine
meeting.py        what ranks learn of each other before they make a group
factory.py        make_group(): meet, then make one of these, or one across hosts (symcomm.hierarchical)
leaving.py        how a rank leaves, and what becomes of its part of the memory
object_calls.py, monitored_barrier.py, custom_plans.py  further calls
buffers.py        any tensor -> address, count, dtype
work.py           operations that run while the caller goes on; watcher.py runs their callbacks
chains.py         a call together with the callbacks of its works
shrink.py         the group of those who go on, as membership/ decides
grow.py           the group with newcomers in it
reconfigure.py    ReconfigurableGroup: members named anew each time
registry.py       groups by name
hooks.py          events for observers
call_hooks.py     hooks around calls, by interception.py; hook_classes.py has some that are ready to use
failure.py        what happened when an operation failed; failure_words.py says it, for all executors alike
standoff.py       detects two ranks that wait for each other
default.py        init(), the default group and the functions on it
spawn.py          ranks from one Python function, as processes or threads
"""
