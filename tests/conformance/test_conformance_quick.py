"""A part of PyTorch's own tests of its backends, on ours; ``make conformance`` runs all of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import loaded

pytestmark = [pytest.mark.torch_versions, pytest.mark.long]

ROOT = Path(__file__).parents[2]


def run(*options: str) -> tuple[int, int, int]:
    """(passed, failed, skipped) of a run that must succeed."""
    pytest.importorskip("torch")
    pytest.importorskip("expecttest")
    command = [sys.executable, "-m", "tests.conformance", "--ranks", "2", "--timeout", "30", *options]
    done = loaded.run(command, timeout=150, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    row = re.search(r"^ +2 +alias +gloo +(\d+) +(\d+) +(\d+) ", done.stdout, re.MULTILINE)
    assert row is not None, done.stdout[-3000:]
    return int(row[1]), int(row[2]), int(row[3])


@pytest.mark.timeout(170)
def test_tests_that_gloo_passes():
    passed, failed, skipped = run("--quick")
    assert passed >= 25 and failed == skipped == 0


# Of PyTorch's tests of DistributedDataParallel: one of each kind, of the fast ones.
DDP = (
    "DistributedDataParallelCPU(_grad_is_view)?|static_graph_api_cpu|ddp_control_flow_same_across_ranks|"
    "ddp_unused_params_rebuild_buckets_exception|invalid_static_graph|ddp_grad_div_uneven_inputs|"
    "ddp_native_mixed_precision_ignored_params|ddp_hook_parity_allreduce|verify_model_across_rank_with_logger|"
    "ddp_zero_output_features|ddp_shared_grad_acc_unused_params|undefined_grad_parity_unused_parameters"
)


@pytest.mark.timeout(170)
@pytest.mark.parametrize("gradients", ["copies", "views"])
def test_tests_of_pytorchs_ddp(gradients: str):
    passed, failed, _ = run("--ddp", gradients, "--pretend-gpus", "-k", f"^test_({DDP})$")
    assert passed >= 10 and failed == 0
