"""accelerate's own launcher: what accelerate.py trains, started by ``accelerate launch``."""

from __future__ import annotations

from tests.programs.accelerate import NEEDS, PARTS, VERSION, main
from tests.programs.frame import tell

__all__ = ["NEEDS", "PARTS", "VERSION", "main"]

# "--multi_gpu" is its word for torchrun, with or without GPUs: for CPUs alone it starts one process.
LAUNCH = (
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes", "{ranks}",
    "--main_process_port", "{port}", "--mixed_precision", "no", "--dynamo_backend", "no",
)  # fmt: skip

if __name__ == "__main__":
    tell(main)
