"""Process groups.

process_group.py  ProcessGroup: how it is built, ends, splits and shrinks
factory.py        make_group(): one of these, or one across hosts (symcomm.hierarchical)
calls.py          its collectives
arguments.py      their arguments, checked
p2p.py            its point-to-point calls
more_calls.py     coalesced forms and the monitored barrier
buffers.py        any tensor -> address, count, dtype
work.py           operations that run while the caller goes on
chains.py         a call together with the callbacks of its works
inline_async.py   whether such an operation may run in its caller's thread
shrink.py         how survivors agree on who goes on
grow.py           how newcomers join
reconfigure.py    ReconfigurableGroup: members named anew each time; handles.py has their names
registry.py       groups by name
hooks.py          events for observers
failure.py        failures, described the same on every rank
standoff.py       detects two ranks that wait for each other
default.py        init(), the default group and the functions on it
spawn.py          ranks from one Python function, as processes or threads
"""
