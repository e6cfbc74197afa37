"""PyTorch's names for the control plane of ``symcomm.observe``."""

from __future__ import annotations

from symcomm.observe.server.handlers import get_handler as _get_handler
from symcomm.observe.server.handlers import get_handler_names as _get_handler_names
from symcomm.observe.server.handlers import register_handler as _register_handler
from symcomm.observe.server.requests import Request as _Request
from symcomm.observe.server.requests import Response as _Response
from symcomm.observe.server.server import WorkerServer as _WorkerServer

__all__ = ["_Request", "_Response", "_WorkerServer", "_get_handler", "_get_handler_names", "_register_handler"]
