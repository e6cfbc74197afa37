"""Logs what hooks are called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

HAS_HOOKS = torch.torch_version.TorchVersion(torch.__version__) >= (2, 15)  # 2.14 has some of them
as_torch_does = pytest.mark.skipif(not HAS_HOOKS, reason=f"torch has hooks since 2.15; this is {torch.__version__}")


class Log:
    """The calls of hooks, in order."""

    def __init__(self, group: Any):
        self.said: list[Any] = []
        group.register_pre_hook(1, self.pre)
        group.register_post_hook(1, self.post)

    def pre(self, args: Any) -> None:
        sizes = [[tuple(t.shape) for t in tensors] for tensors in (args.input_tensors, args.output_tensors)]
        self.said.append(("pre", args.name.name, args.op_id, args.async_op, args.root, *sizes))

    def post(self, args: Any) -> None:
        self.said.append(("post", args.name.name, args.op_id, args.async_op, hasattr(args.work, "wait")))
