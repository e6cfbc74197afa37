/* How kernels are compiled, whatever the instruction set. Nothing else may come before this in a file of kernels. */
#pragma once

/* A fused multiply-add rounds once where two instructions round twice: bits would depend on the CPU.
 * Assuming that no float traps lets choices between floats vectorise. Vectors are all that -O3 adds here: its other
 * loop transformations cost 40% more code and time to build, and gain nothing. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#pragma clang diagnostic ignored "-Wpass-failed" /* products of complex numbers stay scalar */
#else
#pragma GCC optimize("O2", "tree-loop-vectorize", "vect-cost-model=dynamic", "fp-contract=off", "no-trapping-math")
#endif

/* The functions in between may use these instructions: a string, as compilers name them. */
#define TARGET_PRAGMA(...) _Pragma(#__VA_ARGS__)
#if defined(__clang__)
#define TARGET_BEGIN(NAMES) TARGET_PRAGMA(clang attribute push(__attribute__((target(NAMES))), apply_to = function))
#define TARGET_END TARGET_PRAGMA(clang attribute pop)
#else
#define TARGET_BEGIN(NAMES) TARGET_PRAGMA(GCC push_options) TARGET_PRAGMA(GCC target(NAMES))
#define TARGET_END TARGET_PRAGMA(GCC pop_options)
#endif
