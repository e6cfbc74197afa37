"""``torch._inductor.config._collective.auto_select``: small sums become ``torch.ops.symm_mem.one_shot_all_reduce``.

::

    before   all_reduce_(buf0)             after   buf1 = torch.ops.symm_mem.one_shot_all_reduce(buf0)
             wait(buf0)

torch chooses and lowers them: sums of up to ``one_shot_all_reduce_threshold_bytes``, of values that Inductor allocates.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import comm_lowering, config
from torch._inductor.virtualized import V

from symcomm import symm_mem
from symcomm.compile import lowering
from symcomm.torch_backend import versions

_WHY = "auto_select: one_shot_all_reduce leaves its input as it was"


def is_selected(box: Any, reduce_op: str, group_name: Any) -> bool:
    if not config._collective.auto_select or not versions.allocates_comm_buffers():
        return False
    if not getattr(box.get_numel(), "is_number", True):
        return False  # torch would choose it for symbolic sizes too, and fail to allocate
    symm_mem.install()  # the operator takes CPU tensors, and every group of ours has symmetric memory
    return comm_lowering._should_lower_as_one_shot_all_reduce(box, reduce_op, group_name)


def lower(entry: Any, theirs: Any, box: Any, reduce_op: str, group_name: Any) -> Any:
    node = V.graph.current_node
    result = theirs(box, reduce_op, group_name)
    result.realize()
    comm_lowering.mark_as_skip_wait(result)
    lowering.note(entry, node, lowering.group_of(node), [box], [_WHY], True, result.get_name())
    return result
