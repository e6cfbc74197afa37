"""Experts on several ranks: vLLM 0.32 numbers them as if all were here, and its kernel reads past their weights."""

from __future__ import annotations

from typing import Any

import torch

from symcomm.undo import replace

_mended = False


def mend() -> None:
    """Once in a process: a token's share of experts that are elsewhere is nothing here."""
    global _mended
    if _mended:
        return
    _mended = True
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply

    def apply_here(
        self: Any,
        *,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        **others: Any,
    ) -> Any:
        if expert_map is not None:
            here = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(here < 0, 0)
            topk_ids = here.clamp(min=0).to(topk_ids.dtype)
        return apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **others)

    replace(CPUUnquantizedExperts, "apply", apply_here)
