"""Names parameters in a reducer's errors, and shows the logger each error before it is raised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from symcomm import errors


class Faults:
    """The parameters' names, and the way to the logger."""

    def __init__(self, names: Mapping[int, str]):
        self.names = names  # as torch writes them; sparse metadata uses the same
        self.logger: Callable[[], Any] = lambda: None  # a weak reference

    def shown_names(self) -> dict[int, str]:
        """The names without the leading dot that torch gives the parameters of a bare layer (".weight")."""
        return {index: name.lstrip(".") for index, name in self.names.items()}

    def name(self, index: int) -> str:
        return self.names.get(index, f"parameter {index}").lstrip(".")

    def fault(self, error: Exception | str) -> Exception:
        """Tell the logger; returns the exception to raise. A text becomes a CallerError."""
        if isinstance(error, str):
            error = errors.CallerError(error)
        if (logger := self.logger()) is not None:
            logger.set_error_and_log(str(error))
        return error
