"""What each of two ranks runs to see whether they can share a device's memory: `symcomm doctor` starts them."""

from __future__ import annotations

import sys

SIZES = (1 << 10, 1 << 20)  # elements: through host memory, and in the GPU's own


def main(device: str) -> None:
    import torch
    import torch.distributed as dist

    from symcomm.backend.register import register

    register()  # torch does so by itself where the package is installed, and not only found
    dist.init_process_group("symcomm")
    for count in SIZES:
        values = torch.full((count,), float(dist.get_rank() + 1), device=device)
        dist.all_reduce(values)
        expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
        if not bool((values == expected).all()):
            raise SystemExit(f"wrong values on {device}: {values[0].item()} instead of {expected}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
