"""What a reducer's errors call the parameters, and where they are logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from symcomm import errors


class Faults:
    """Names of parameters, and errors that the logger is told of before they are raised."""

    def __init__(self, names: Mapping[int, str]):
        self.names = names  # as torch writes them, which sparse metadata have too
        self.logger: Callable[[], Any] = lambda: None  # a weak reference

    def shown_names(self) -> dict[int, str]:
        """torch joins names with a dot, so parameters of a bare layer come as ".weight"."""
        return {index: name.lstrip(".") for index, name in self.names.items()}

    def name(self, index: int) -> str:
        return self.names.get(index, f"parameter {index}").lstrip(".")

    def fault(self, error: Exception | str) -> Exception:
        """The exception to raise, once the logger has it. A text is about a mistake of the caller's."""
        if isinstance(error, str):
            error = errors.CallerError(error)
        if (logger := self.logger()) is not None:
            logger.set_error_and_log(str(error))
        return error
