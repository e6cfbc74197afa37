"""The C core: all that must not wait for the interpreter.

module/     the Python module, a list of parts that each add their functions; arguments; the interpreter lock
os/         clocks, futexes, threads, small files
memory/     shared mappings and bytes, the word by which the kernel says that a rank died, pages isolated from a stopped
            peer, copies with non-temporal stores
sync/       published progress; the one wait, its sleep and what it does before; how a group fails; who called; and
            whether there is a core for every rank
exec/       load and run a plan (see symcomm.collectives.plan) in one call; operations that run while the caller goes
            on; the dispatch cache, which takes calls seen before from Python tensors to the executor; cross-memory
            attach
group/      a group, in shared memory and in a process: its life, visits and leaving; the type native.Group
p2p/        tagged messages between two ranks: channels, matching, progress, large copies that both ranks make
onesided/   signal pads, and windows: copies into a peer's memory, counted signals
reduce/     one-pass reductions over N sources, for every dtype and operation; kernels for each instruction set
torch/      torch's tensors and options objects, read without Python; many small tensors in one call
cuda/       what a collective asks of a CUDA stream, in one call
store/      the TCPStore: server (event loop, protocol, table, token) and client
observe/    the flight recorder, reports about a group, and the watchdog of the interpreter lock

C files include each other by their path from here.
"""

from symcomm._core import _native as native

__all__ = ["native"]
