"""Which tests run where: on another torch (`make test-torch`), on another Python without torch (`make test-python`).

``python -m tests.tools.selections torch`` prints the files of a selection. Every test file is in one of the three
lists, or in both of the first two; `tests/project/test_selections.py` notices one that is in none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1]

# What depends on the version of torch: its groups, stores, operators, compiler, DDP, and the programs built on them.
TORCH = (
    "autograd",
    "c10d_ddp", "c10d_engine", "c10d_enums", "c10d_groups", "c10d_handed_over", "c10d_names", "c10d_options",
    "c10d_store_grid", "c10d_stores", "c10d_symmetric", "c10d_works", "c10d_wrapper", "c10d_wrong_types",
    "compile_checks", "compile_options", "conformance_quick", "ddp_checks", "ddp_hook_order", "ddp_hooks",
    "ddp_hooks_local", "default_group_name", "device_autograd",
    "device_coalesced", "device_copies", "device_data_parallel", "device_nested", "doctor", "engines", "examples",
    "gpu_trouble", "gpu_without", "group_creation", "group_life", "group_life_memory", "handshake", "hooks",
    "hooks_torch", "hosts_torch", "inference", "loaded", "meeting_failures", "profile_fields", "random_graphs",
    "every_name", "reconfigure_torch", "shared_heap",
    "refusals_torch", "short_way",
    "store_collectives",
    "store_contract", "store_model", "symm_mem", "symm_ops", "symmetrize", "tcp_store_interop", "torch_backend",
    "torch_versions", "trace_dumps", "undo", "windows", "windows_failures",
)  # fmt: skip

# What runs where torch is not installed. Tests in these files that compare with torch are skipped there, and say so.
WITHOUT_TORCH = (
    "arena", "arena_shortages", "arena_strangers", "cli", "cli_completion", "cli_usage",
    "control_api", "control_attacks", "control_stacks", "doctor",
    "errors", "launch_conventions", "launcher", "launcher_blame", "launcher_elastic", "launcher_token", "limits",
    "loaded",
    "metrics", "native_stub", "numa", "numpy_ranks", "objects", "observe_together", "plan_bugs", "plan_failures",
    "plans", "rendezvous", "selections", "simulate", "store_collectives", "store_contract", "store_file",
    "store_model", "tcp_store", "tcp_store_hostile", "top_model", "top_page", "top_servers", "trace_verdict",
)  # fmt: skip

# Torch tensors in calls that have been the same in all its versions, our own sources, or tools that few machines have.
MAIN_ONLY = (
    "agreement", "agreement_hosts", "async", "attached", "attached_messages", "attack", "bench", "bench_attach",
    "bench_gpu", "bench_kernels", "bench_noise", "bench_progress", "bench_still", "calibration",
    "collectives", "control_plane", "custom_plans", "death", "demo", "docs", "elastic", "failures", "flight", "fuzz",
    "giving_up",
    "gpu_collectives", "gpu_comm", "gpu_failures", "gpu_graphs", "gpu_torch", "gpu_windows", "groups", "grow",
    "heap_stress", "held_receives", "hosts_aftermath",
    "hosts_attack", "hosts_failures", "hosts_giving_up", "hosts_lines", "hosts_messages", "hosts_network",
    "hosts_programs", "hosts_strangers", "hosts_values",
    "integrations", "joint_copies", "layers", "leaving", "litmus", "model", "p2p", "ray", "reconfigure",
    "reconfigure_deaths", "reduce_kernels", "reentrant", "refusals", "site", "sites", "soak_short", "spawn", "standoff",
    "stops", "store_kept_socket", "stream", "top_browser", "top_feed", "trace_failures", "trace_live",
    "trace_timing", "trust", "views_without_torch", "visits", "waiting", "waking", "workflow",
)  # fmt: skip

# What takes longest, longest first: `make test` begins with it.
LONG = (
    "compile_checks", "inference", "examples", "docs", "collectives", "torch_backend", "group_life",
    "conformance_quick", "plan_failures", "launcher", "plans", "compile_options", "store_contract", "trust",
    "ddp_hooks", "reduce_kernels", "soak_short", "demo", "leaving", "hosts_network", "undo", "doctor", "spawn",
    "elastic", "bench", "model", "simulate", "stops",
)  # fmt: skip

SELECTIONS = {"torch": TORCH, "without-torch": WITHOUT_TORCH}


def files(names: Sequence[str]) -> list[str]:
    found = {path.stem: path for path in TESTS.rglob("test_*.py")}
    return [str(found[f"test_{name}"].relative_to(TESTS.parent)) for name in names]


if __name__ == "__main__":
    print(*files(SELECTIONS[sys.argv[1]]))
