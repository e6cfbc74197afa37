"""Logger: facts about a run of DistributedDataParallel, under the keys that PyTorch's Logger uses."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from symcomm.ddp.arguments import reducer_of
from symcomm.ddp.timeline import not_compiled
from symcomm.torch_backend import values

# As PyTorch's Logger spells them.
_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_ENVIRONMENT_OF_GLOO = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
# key -> (the event it begins with, the event it ends with)
_DURATIONS = {
    "forward_compute_time": ("forward_start", "backward_start"),
    "backward_compute_time": ("backward_start", "compute_end"),
    "backward_comm_time": ("comm_start", "comm_end"),
    "backward_compute_comm_overlap_time": ("comm_start", "compute_end"),
}
_MOMENTS = {
    "forward_compute_time_start": "forward_start",
    "backward_compute_time_start": "backward_start",
    "backward_comm_time_start": "comm_start",
    "backward_compute_time_end": "compute_end",
    "backward_comm_time_end": "comm_end",
}


class DDPLoggingData:
    """Words and numbers by key.

    Raises: WrongTypeError for a map of anything else."""

    __slots__ = ("_ints_map", "_strs_map")

    def __init__(self) -> None:
        self._strs_map: dict[str, str] = {}
        self._ints_map: dict[str, int] = {}

    @property
    def strs_map(self) -> dict[str, str]:
        return self._strs_map

    @strs_map.setter
    def strs_map(self, words: dict[str, str]) -> None:
        self._strs_map = values.mapping("DDPLoggingData.strs_map", words, values.text, values.text, "str to str")

    @property
    def ints_map(self) -> dict[str, int]:
        return self._ints_map

    @ints_map.setter
    def ints_map(self, numbers: dict[str, int]) -> None:
        self._ints_map = values.mapping("DDPLoggingData.ints_map", numbers, values.text, values.integer, "str to int")


def _listed(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items))


class Logger:
    """Collects facts about a reducer; the reducer refers back to it only weakly.

    Raises: WrongTypeError."""

    def __init__(self, reducer: Any):
        self._reducer = reducer_of("Logger", reducer)
        self._data = DDPLoggingData()
        self._samples = 0

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Record what is known once the module is wrapped."""
        reducer, strs, ints = self._reducer, self._data.strs_map, self._data.ints_map
        params, group = reducer.params, reducer.process_group
        call = "set_construction_data_and_log"
        static_graph = values.flag(f"{call}: static_graph", static_graph)
        strs["module_name"] = values.text(f"{call}: module_name", module_name)
        strs["device_ids"] = _listed(values.ranks(f"{call}: device_ids", device_ids))
        strs["dtypes"] = _listed(dict.fromkeys(_DTYPE_NAMES.get(p.dtype, str(p.dtype)[6:]) for p in params))
        strs["backend_name"] = backend = getattr(group, "known_as", group.name)()
        strs["bucket_sizes"] = _listed(bucket.nbytes for bucket in reducer.buckets)
        is_gloo = backend == "gloo"
        for name in _ENVIRONMENT + _ENVIRONMENT_OF_GLOO * is_gloo:
            strs[name.lower()] = os.environ.get(name, "N/A")
        ints["output_device"] = values.short(f"{call}: output_device", output_device)
        ints["broadcast_buffers"] = int(values.flag(f"{call}: broadcast_buffers", broadcast_buffers))
        ints["has_sync_bn"] = int(values.flag(f"{call}: has_sync_bn", has_sync_bn))
        ints["world_size"] = group.size()
        ints["rank"] = group.rank()
        ints["iteration"] = 0
        ints["is_multi_device_module"] = int(len({p.device for p in params}) > 1)
        ints["num_parameter_tensors"] = len(params)
        ints["total_parameter_size_bytes"] = sum(p.numel() * p.element_size() for p in params)
        ints["bucket_cap_bytes"] = reducer.bucket_bytes_cap
        ints["find_unused_parameters"] = int(reducer.find_unused_parameters)
        ints["gradient_as_bucket_view"] = int(reducer.gradient_as_bucket_view)
        if is_gloo and hasattr(options := group._get_backend(params[0].device).options, "_threads"):
            ints["gloo_num_threads"] = options._threads
        if static_graph:
            ints["static_graph"] = 1

    @not_compiled
    def set_runtime_stats_and_log(self) -> None:
        """Record facts about the last iteration; called before each forward pass."""
        reducer, strs, ints = self._reducer, self._data.strs_map, self._data.ints_map
        if not reducer.is_sampled():
            return
        self._samples += 1
        ints["iteration"] = reducer.iterations
        unused = [reducer.params[i] for i in reducer.unused]
        ints["unused_parameter_size"] = sum(p.numel() * p.element_size() for p in unused)
        ints["num_buckets_reduced"] = reducer.buckets_reduced
        if ints.setdefault("has_rebuilt_buckets", 0) != int(reducer.has_rebuilt):
            ints["has_rebuilt_buckets"] = int(reducer.has_rebuilt)
            strs["rebuilt_bucket_sizes"] = _listed(bucket.nbytes for bucket in reducer.buckets)
            per_bucket = (" ".join(map(str, bucket.indices)) for bucket in reducer.buckets)
            strs["rebuilt_per_bucket_param_indices"] = _listed(per_bucket)
        if reducer.ready_order:
            strs["prev_iteration_grad_ready_order_indices"] = _listed(reducer.ready_order)
        clock = reducer.clock
        for key, (start, end) in _DURATIONS.items():
            begun, ended = getattr(clock, start), getattr(clock, end)
            if begun and ended:
                ints[key] = max(0, ended - begun)
            before = ints.get(f"avg_{key}", 0) * (self._samples - 1)
            ints[f"avg_{key}"] = (ints.setdefault(key, 0) + before) // self._samples
        for key, event in _MOMENTS.items():
            ints[key] = getattr(clock, event)

    def set_error_and_log(self, error: str) -> None:
        self._data.strs_map["error"] = values.text("set_error_and_log: error", error)
        self._data.ints_map["has_error"] = 1
        self._data.ints_map["iteration"] = self._reducer.iterations

    def graph_is_static(self, static: bool) -> None:
        """Record whether static_graph=True could be set, judged by the iterations so far."""
        self._data.ints_map["can_set_static_graph"] = int(static)

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self._data.strs_map["comm_hook"] = values.text("_set_comm_hook_name: comm_hook", comm_hook)

    def _set_static_graph(self) -> None:
        self._data.ints_map["static_graph"] = int(self._reducer.static_graph)

    def _set_uneven_input_join(self) -> None:
        self._data.ints_map["join_uneven_inputs"] = 1

    def _get_ddp_logging_data(self) -> DDPLoggingData:
        data = DDPLoggingData()
        data.strs_map, data.ints_map = dict(self._data.strs_map), dict(self._data.ints_map)
        return data
