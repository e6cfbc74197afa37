"""What each of two ranks runs to see whether they can share a device's memory: `symcomm doctor` starts them."""

from __future__ import annotations

import sys


def main(device: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("symcomm")
    values = torch.full((1 << 16,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(values)
    expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    if not bool((values == expected).all()):
        raise SystemExit(f"wrong values on {device}: {values[0].item()} instead of {expected}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
