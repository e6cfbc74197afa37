"""The command line; see the package's text."""

from __future__ import annotations

import argparse
import re
import sys
import time
import unittest

from tests.conformance.patches import ASKS_GLOO_ITSELF, MODES, load_suite
from tests.conformance.suite import FAILED, PASSED, SKIPPED, Result, gloo_passes, make_cases, run_one

# One of each kind, of the fast ones: what `--quick` and the test suite run.
QUICK = (
    "Backend_enum_class", "get_backend", "get_rank", "destroy_group", "send_recv", "send_recv_any_source",
    "send_recv_with_tag_autograd_profiler", "isend", "irecv", "batch_isend_irecv_gloo", "broadcast", "reduce_sum",
    "reduce_max", "all_reduce_sum", "all_reduce_sum_async", "all_reduce_sum_complex", "all_reduce_coalesced_sum",
    "sparse_all_reduce_sum", "scatter", "gather", "gather_checks", "all_gather", "all_gather_coalesced_simple",
    "all_gather_object_default_pg", "scatter_object_list", "get_future", "DistributedDataParallelCPU",
    "static_graph_api_cpu", "accumulate_gradients_no_sync_allreduce_with_then_hook",
    "monitored_barrier_gloo_subgroup",
)  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mode", choices=MODES, default="alias", help="stock: plain Gloo, to measure the baseline")
    parser.add_argument("--as", dest="names", default="", help="gloo, or gloo+mpi (default with 3 ranks and more)")
    parser.add_argument(
        "--ddp",
        choices=("", "copies", "views"),
        default="",
        help="our data-parallel layer; what gradients are by default",
    )
    parser.add_argument("--pretend-gpus", action="store_true", help="run tests that ask for GPUs too, on the CPU")
    parser.add_argument("-k", dest="pattern", default="", help="only tests whose name this matches")
    parser.add_argument("--quick", action="store_true", help=f"only {len(QUICK)} tests, one of each kind")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one test")
    parser.add_argument("--list", action="store_true", help="print the tests' names only")
    options = parser.parse_args(argv)
    options.names = options.names or ("gloo+mpi" if options.ranks > 2 else "gloo")
    return options


def report(options: argparse.Namespace, results: list[Result], seconds: float) -> int:
    """The table; 0 when nothing failed and everything that Gloo passes was passed."""
    tag = str(options.ranks) + ("+mpi" if "mpi" in options.names else "")
    chosen = {r.name for r in results}
    passed = {r.name for r in results if r.status == PASSED}
    gloo = (gloo_passes(tag) or gloo_passes(str(options.ranks))) & chosen
    behind = sorted(gloo - passed)
    counts = {status: sum(r.status == status for r in results) for status in (PASSED, FAILED, SKIPPED)}
    for result in results:
        if result.status == FAILED:
            print(f"\n== {result.name}\n{result.printed[-4000:]}\n{result.why[-2000:]}")
    row = "{:>5}  {:<12} {:<9} {:>6} {:>6} {:>7} {:>11}  {}".format
    print("\n" + row("ranks", "mode", "as", *counts, "Gloo passes", "seconds"))
    print(row(options.ranks, options.mode, options.names, *counts.values(), len(gloo), f"{seconds:.0f}"))
    print("failed:", ", ".join(r.name for r in results if r.status == FAILED) or "none")
    print("passed by Gloo but not here:", ", ".join(behind) or "none")
    return 1 if counts[FAILED] or behind or not results else 0


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    names_taken = frozenset(options.names.split("+"))
    suite = load_suite(options.mode, names_taken, options.ranks, options.ddp, options.pretend_gpus)
    cases = make_cases(suite, options.start)
    names = [n for n in unittest.TestLoader().getTestCaseNames(cases) if re.search(options.pattern, n)]
    if options.quick:
        quick = {f"test_{name}" for name in QUICK}
        names = [n for n in names if n in quick]
    if options.pretend_gpus:
        from tests.conformance.pretend import NEED_GPUS

        names = [n for n in names if not re.search(NEED_GPUS, n)]
    if options.ddp == "views":
        names = [n for n in names if n != "test_ddp_logging_data_cpu"]  # it wants PyTorch's default
    if options.mode == "impersonate":
        names = [n for n in names if n not in ASKS_GLOO_ITSELF]
    if options.list:
        print("\n".join(names))
        return 0
    results = []
    started = time.monotonic()
    for number, name in enumerate(names, start=1):
        result = run_one(cases, name, options.timeout)
        results.append(result)
        print(f"[{number}/{len(names)}] {result.status:<7} {result.seconds:5.1f} s  {name}", flush=True)
    return report(options, results, time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())
