"""The kernels of single_kernel.py, in CUDA C, for a dtype, a reduction and a number of ranks."""

from __future__ import annotations

# A whole all_reduce; single_kernel.py tells how. Flags are 64 bits, so that they never come round.
SINGLE_KERNEL = """
typedef unsigned long long u64;
struct Turn {{
    const T *src; T *dst; T *half[{sources}]; u64 *signals[{sources}]; const u64 *mine;
    volatile unsigned *arrivals[{sources}];
    volatile unsigned *stop; u64 *gate; unsigned *count; u64 rank, value;
}};
__device__ void signal(u64 *at, u64 value) {{
    asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(at), "l"(value) : "memory");
}}
__device__ u64 load(const u64 *at) {{
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}}
/* Thread k is for peer k. At a kernel's FIRST and LAST signal the last block to come to it also writes the flag words
   in host memory. Each has a count of its own: one block may be at the last while another is at the first. */
enum {{ FIRST, LAST, NEITHER }};
__device__ void signal_peers(const Turn &t, const u64 value, const int which) {{
    const unsigned peer = threadIdx.x;
    __syncthreads();
    if (peer < {sources} && peer != t.rank) signal(t.signals[peer] + blockIdx.x * {sources}, value);
    if (which == NEITHER) return;
    __syncthreads();
    if (peer == 0 && atomicAdd(t.count + which, 1) == gridDim.x - 1) {{
        t.count[which] = 0;
        __threadfence_system();
        for (int q = 0; q < {sources}; q++) if (q != t.rank) *t.arrivals[q] = (unsigned)value;
        __threadfence_system();
    }}
}}
/* False: the group has failed. */
__device__ bool wait_for_peers(const Turn &t, const u64 value) {{
    __shared__ unsigned stopped;
    const unsigned peer = threadIdx.x;
    if (peer == 0) stopped = 0;
    __syncthreads();
    if (peer < {sources} && peer != t.rank) {{
        for (unsigned looks = 1; load(t.mine + blockIdx.x * {sources} + peer) < value; looks++)
            if (looks % 1024 == 0 && *t.stop) {{ stopped = 1; break; }}
    }}
    __syncthreads();
    return !stopped;
}}
__device__ bool barrier_with_peers(const Turn &t, const u64 value, const int which) {{
    signal_peers(t, value, which);
    return wait_for_peers(t, value);
}}

/* Blocks that read the host's word take 2 us one after the other: the first reads it, and tells the others. */
__device__ bool is_stopped(const Turn &t) {{
    __shared__ unsigned stopped;
    if (threadIdx.x == 0) {{
        u64 seen = t.value << 1;
        if (blockIdx.x == 0) signal(t.gate, seen | (*t.stop != 0));
        while ((seen = load(t.gate)) >> 1 != t.value);
        stopped = seen & 1;
    }}
    __syncthreads();
    return stopped;
}}
__device__ Pack combined(const Pack *in) {{
    Pack out;
#pragma unroll
    for (int k = 0; k < {per_pack}; k++)
        out.item[k] = finished(tree([&](int s) {{ return widened(in[s].item[k]); }}));
    return out;
}}
__device__ T combined_at(const Turn &t, u64 at) {{
    return finished(tree([&](int s) {{ return widened(t.half[s][at]); }}));
}}
__device__ T combined_with(const Turn &t, u64 at, T own) {{
    return finished(tree([&](int s) {{ return widened(s == t.rank ? own : t.half[s][at]); }}));
}}
__device__ uint4 pack_at(const T *from, u64 at, u64 aligned) {{
    if (aligned) return ((const uint4 *)from)[at];
    Pack pack;
    for (int k = 0; k < {per_pack}; k++) pack.item[k] = from[at * {per_pack} + k];
    return pack.whole;
}}
__device__ void put_pack(T *into, u64 at, uint4 whole, u64 aligned) {{
    if (aligned) {{ ((uint4 *)into)[at] = whole; return; }}
    Pack pack;
    pack.whole = whole;
    for (int k = 0; k < {per_pack}; k++) into[at * {per_pack} + k] = pack.item[k];
}}

/* Packs begin to end, several at a time: loads take long. */
__device__ void copy_packs(T *into, const T *from, u64 into_aligned, u64 from_aligned, u64 begin, u64 end) {{
    const u64 first = begin + (u64)blockIdx.x * blockDim.x + threadIdx.x, stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = first; i < end; i += stride * {at_once}) {{
        uint4 in[{at_once}];
#pragma unroll
        for (int u = 0; u < {at_once}; u++)
            if (i + u * stride < end) in[u] = pack_at(from, i + u * stride, from_aligned);
#pragma unroll
        for (int u = 0; u < {at_once}; u++)
            if (i + u * stride < end) put_pack(into, i + u * stride, in[u], into_aligned);
    }}
}}
/* own: this rank's packs are those of its tensor, and the result goes into its staging area as well. */
__device__ void combine_packs(const Turn &t, const bool own, const u64 aligned, const u64 begin, const u64 end) {{
    const u64 first = begin + (u64)blockIdx.x * blockDim.x + threadIdx.x, stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = first; i < end; i += stride * {at_once}) {{
        Pack in[{at_once}][{sources}];
#pragma unroll
        for (int u = 0; u < {at_once}; u++)
            if (i + u * stride < end)
#pragma unroll
                for (int s = 0; s < {sources}; s++)
                    in[u][s].whole = own && s == t.rank ? pack_at(t.src, i + u * stride, aligned)
                                                        : ((const uint4 *)t.half[s])[i + u * stride];
#pragma unroll
        for (int u = 0; u < {at_once}; u++) {{
            const u64 at = i + u * stride;
            if (at >= end) continue;
            const Pack out = combined(in[u]);
            put_pack(t.dst, at, out.whole, aligned);
            if (own) ((uint4 *)t.half[t.rank])[at] = out.whole;
        }}
    }}
}}
__device__ void copy_in(const Turn &t, const u64 n, const u64 aligned) {{
    const u64 packs = n / {per_pack}, last = packs * {per_pack} + (u64)blockIdx.x * blockDim.x + threadIdx.x;
    copy_packs(t.half[t.rank], t.src, 1, aligned, 0, packs);
    if (last < n) t.half[t.rank][last] = t.src[last];
}}
__device__ void combine_out(const Turn &t, const u64 n, const u64 aligned) {{
    const u64 packs = n / {per_pack}, last = packs * {per_pack} + (u64)blockIdx.x * blockDim.x + threadIdx.x;
    combine_packs(t, false, aligned, 0, packs);
    if (last < n) t.dst[last] = combined_at(t, last);
}}

/* Copy into this rank's staging area, barrier, combine all of it. */
extern "C" __global__ void __launch_bounds__({threads}) all_reduce_one_shot(const Turn t, const u64 n,
                                                                              const u64 aligned) {{
    copy_in(t, n, aligned);
    if (!barrier_with_peers(t, t.value, FIRST)) return; /* the memory of a rank that died is not there any more */
    combine_out(t, n, aligned);
}}

/* The same in a CUDA graph, whose every replay has the same arguments: the number of the barrier is read in the GPU's
   memory (gate[0]), and the last block to end counts on. A second barrier keeps the next replay's copy away from what
   peers still read. */
extern "C" __global__ void __launch_bounds__({threads}) all_reduce_captured(const Turn t, const u64 n,
                                                                              const u64 aligned) {{
    const u64 value = *(const volatile u64 *)t.gate + 1;
    copy_in(t, n, aligned);
    if (!barrier_with_peers(t, value, NEITHER)) return;
    combine_out(t, n, aligned);
    if (!barrier_with_peers(t, value + 1, NEITHER) || threadIdx.x) return;
    unsigned *const ended = (unsigned *)(t.gate + 1);
    __threadfence();
    if (atomicAdd(ended, 1) == gridDim.x - 1) {{
        *ended = 0;
        *(volatile u64 *)t.gate = value + 1;
    }}
}}

/* On symmetric tensors (half[]), in place: barrier, combine this rank's part and write it to all, barrier. Blocks wait
   for those of the same number: a kernel ends when all of its blocks have seen that all of the others' have written. */
extern "C" __global__ void __launch_bounds__({threads}) all_reduce_direct(const Turn t, const u64 n, const u64) {{
    const u64 packs = n / {per_pack}, part = (packs + {sources} - 1) / {sources};
    const u64 begin = min(t.rank * part, packs), end = min(begin + part, packs);
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, stride = (u64)gridDim.x * blockDim.x;
    const u64 last = packs * {per_pack} + first;
    if (!barrier_with_peers(t, t.value, FIRST) || is_stopped(t)) return;
    for (u64 i = begin + first; i < end; i += stride * {at_once}) {{
        Pack in[{at_once}][{sources}];
#pragma unroll
        for (int u = 0; u < {at_once}; u++)
            if (i + u * stride < end)
#pragma unroll
                for (int s = 0; s < {sources}; s++) in[u][s].whole = ((const uint4 *)t.half[s])[i + u * stride];
#pragma unroll
        for (int u = 0; u < {at_once}; u++) {{
            const u64 at = i + u * stride;
            if (at >= end) continue;
            const Pack out = combined(in[u]);
#pragma unroll
            for (int s = 0; s < {sources}; s++) ((uint4 *)t.half[s])[at] = out.whole;
        }}
    }}
    if (t.rank == {sources} - 1 && last < n) {{
        const T result = combined_at(t, last);
        for (int s = 0; s < {sources}; s++) t.half[s][last] = result;
    }}
    barrier_with_peers(t, t.value + 1, LAST);
}}

/* For large tensors: copy into the staging area what peers combine, barrier, combine this rank's part into its tensor
   and its staging area, barrier, copy the peers' parts. Block k has the same packs on all ranks. */
extern "C" __global__ void __launch_bounds__({threads}) all_reduce_two_shot(const Turn t, const u64 n,
                                                                              const u64 aligned) {{
    const u64 packs = n / {per_pack}, part = (packs + {sources} - 1) / {sources};
    const u64 last = packs * {per_pack} + (u64)blockIdx.x * blockDim.x + threadIdx.x; /* behind the packs */
    const bool combines_last = t.rank == {sources} - 1;
    T *const mine = t.half[t.rank];
    for (int q = 0; q < {sources}; q++)
        if (q != t.rank) copy_packs(mine, t.src, 1, aligned, min(q * part, packs), min((q + 1) * part, packs));
    if (!combines_last && last < n) mine[last] = t.src[last];
    if (!barrier_with_peers(t, t.value, FIRST)) return;
    combine_packs(t, true, aligned, min(t.rank * part, packs), min((t.rank + 1) * part, packs));
    if (combines_last && last < n) t.dst[last] = mine[last] = combined_with(t, last, t.src[last]);
    if (!barrier_with_peers(t, t.value + 1, LAST)) return;
    for (int q = 0; q < {sources}; q++)
        if (q != t.rank) copy_packs(t.dst, t.half[q], aligned, 1, min(q * part, packs), min((q + 1) * part, packs));
    if (!combines_last && last < n) t.dst[last] = t.half[{sources} - 1][last];
}}
"""
