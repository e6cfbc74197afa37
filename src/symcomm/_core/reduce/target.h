/* How kernels are compiled, whatever the instruction set. Files of kernels include this first. */
#pragma once

/* No fused multiply-add: it rounds once where two instructions round twice, so bits would depend on the CPU. No float
 * traps: then choices between floats vectorise. Of -O3 only the vectorisers: its other loop transformations cost 40%
 * more code and time to build, and gain nothing. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#pragma clang diagnostic ignored "-Wpass-failed" /* a loop that stays scalar is no error */
#else
#pragma GCC optimize("O2", "tree-loop-vectorize", "vect-cost-model=dynamic", "fp-contract=off", "no-trapping-math")
#endif

/* Functions between TARGET_BEGIN and TARGET_END may use the instructions NAMES, a string of the compilers' names. */
#define TARGET_PRAGMA(...) _Pragma(#__VA_ARGS__)
#if defined(__clang__)
#define TARGET_BEGIN(NAMES) TARGET_PRAGMA(clang attribute push(__attribute__((target(NAMES))), apply_to = function))
#define TARGET_END TARGET_PRAGMA(clang attribute pop)
#else
#define TARGET_BEGIN(NAMES) TARGET_PRAGMA(GCC push_options) TARGET_PRAGMA(GCC target(NAMES))
#define TARGET_END TARGET_PRAGMA(GCC pop_options)
#endif
