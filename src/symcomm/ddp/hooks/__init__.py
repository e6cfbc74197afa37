"""Communication hooks that send fewer bytes for each gradient bucket.

``model.register_comm_hook(state, hook)`` takes any of these pairs, on torch's DistributedDataParallel and on ours::

    cast.py        CastState, cast_hook              gradients travel as bf16 or fp16
    blockwise.py   BlockwiseState, blockwise_hook    int8 or fp8 with a scale for each block
    topk.py        TopKState, topk_hook              only the largest values travel
    power_sgd.py   PowerSGDState, power_sgd_hook     matrices travel as two thin factors
    local_sgd.py   LocalSGDState, local_sgd_hook     no gradients; parameters are averaged every few steps
    diloco.py      DiLoCoState, local_sgd_hook       the same, with an outer optimizer with momentum

    _state.py      what all states share: the group, the counters of bytes, the choice to compress or not
    _residuals.py  error feedback: what was left out, kept for each parameter
    _exchange.py   the collectives that hooks use
    compare.py     ``python -m symcomm.ddp.hooks.compare``: bytes and final loss of each, measured
"""

from symcomm.ddp.hooks.blockwise import BlockwiseState, blockwise_hook
from symcomm.ddp.hooks.cast import CastState, cast_hook
from symcomm.ddp.hooks.diloco import DiLoCoState
from symcomm.ddp.hooks.local_sgd import LocalSGDState, local_sgd_hook
from symcomm.ddp.hooks.power_sgd import PowerSGDState, power_sgd_hook
from symcomm.ddp.hooks.topk import TopKState, topk_hook

__all__ = [
    "BlockwiseState", "CastState", "DiLoCoState", "LocalSGDState", "PowerSGDState", "TopKState", "blockwise_hook",
    "cast_hook", "local_sgd_hook", "power_sgd_hook", "topk_hook",
]  # fmt: skip
