"""Collectives and symmetric memory on GPUs, for ranks of one host.

driver.py      the NVIDIA driver's functions that torch does not offer
pool.py        memory that other processes can open, and tensors over it
kernels.py     combining several ranks' data in one kernel
tensor_views.py a CUDA tensor -> where its elements are, how many, of which dtype
flag_words.py  flags in host memory that GPUs write and wait for
watchdog.py    a thread that ends GPU waits when a rank has died, or a deadline passed
failure.py     the failures that it found, in words
departure.py   when ranks no longer use each other's memory
group.py       CudaGroup: how its ranks meet, and the parts that it owns
executor.py    runs its requests: hosts synchronize, then streams
recipes.py     what each request needs, and what goes into the stream
staging.py     memory in which operations stage tensors
stream_collectives.py collectives as work for a stream; single_kernel.py, via_host.py: faster ones for small tensors
p2p.py         point-to-point messages
work.py        operations that run while the caller goes on
devices.py     which GPU a rank has, and which can reach which

Nothing here needs CUDA, Triton or a driver to be imported.
"""
