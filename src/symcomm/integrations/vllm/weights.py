"""vLLM's weight transfer, with the backend "symcomm": each worker maps what a trainer has put on a board of this host,
and loads its part of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import reload

from symcomm.sharing.board import BoardReader, Snapshot

FOUND = 60.0  # seconds for the board, and for a version


@dataclass
class BoardInfo(WeightTransferInitInfo):
    """``board``: its name. ``token``: what its readers have to hold, where that is not the job's."""

    board: str
    token: str | None = None


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    """``version``: no earlier one than this, for which to wait ``timeout`` seconds."""

    version: int = 0
    timeout: float = FOUND


class BoardWeightTransferEngine(WeightTransferEngine[BoardInfo, VersionInfo]):
    init_info_cls, update_info_cls = BoardInfo, VersionInfo
    _reader: BoardReader | None = None

    def init_transfer_engine(self, init_info: BoardInfo) -> None:
        self.shutdown()
        self._reader = BoardReader(init_info.board, timeout=FOUND, token=init_info.token)

    def start_weight_update(self) -> None:
        reload.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: VersionInfo) -> None:
        self.model.load_weights(self._agreed(update_info).state.items())

    def finish_weight_update(self) -> None:
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def _agreed(self, wanted: VersionInfo) -> Snapshot:
        """The same version on every rank, though the trainer may go on meanwhile."""
        assert self._reader is not None, "init_weight_transfer_engine names the board"
        group = get_world_group().cpu_group
        versions: list[Any] = [None] * group.size()
        end = time.monotonic() + wanted.timeout
        while True:
            found = self._reader.newest()
            while found is None or found.version < wanted.version:
                found = self._reader.wait(max(0.0, end - time.monotonic()))
            dist.all_gather_object(versions, found.version, group)
            if len(set(versions)) == 1:
                return found

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
