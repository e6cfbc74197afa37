"""What a handler gets and what it fills in: a Request and a Response, with PyTorch's methods."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from symcomm.errors import CallerError, bad_argument


class Request:
    """What a client asked for.

    ``trusted``: it comes from our own user, or holds the token; only then may it see what the program does.
    ``has_token``: it holds the token itself, which is needed for secrets of the job. ``rank`` is the rank whose server
    was asked (see server.ServedRank), None when there is none.

    Raises: UnicodeDecodeError from ``body()``, BadArgumentError from ``get_number()``."""

    def __init__(
        self,
        body: bytes = b"",
        params: Mapping[str, str] | None = None,
        *,
        method: str = "POST",
        path: str = "/",
        headers: Any = None,
        trusted: bool = False,
        has_token: bool = False,
        rank: Any = None,
    ):
        self._body = body
        self.params = dict(params or {})
        self.method = method
        self.path = path
        self.headers = headers if headers is not None else {}
        self.trusted = trusted
        self.has_token = has_token
        self.rank = rank

    @property
    def group(self) -> Any:
        """The rank's first group. CallerError if the server knows of none."""
        if self.rank.group is None:
            raise CallerError("this server knows of no group; start it with group=, or by SYMCOMM_SERVER=1.")
        return self.rank.group

    def body(self) -> str:
        """The body as text; a body that is not UTF-8 raises UnicodeDecodeError, as in PyTorch."""
        return self._body.decode()

    def get_param(self, name: str) -> str:
        """A parameter of the query or of a form; empty if it was not given."""
        return self.params.get(name, "")

    def get_number(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number among the parameters."""
        text = self.get_param(name)
        if not text:
            return default
        if not text.lstrip("-").isdecimal() or len(text) > 20 or not low <= int(text) <= high:
            raise bad_argument(self.path, name, text[:40], f"a number of {low} to {high}")
        return int(text)


class Response:
    """The answer; empty with status 200 unless something is set. Raises: TypeError, BadArgumentError."""

    def __init__(self, content: str | bytes = b"", content_type: str = "", status: int = 200) -> None:
        self.status = status
        self.content = content.encode() if isinstance(content, str) else content
        self.content_type = content_type
        self.headers: dict[str, str] = {}

    @classmethod
    def of_json(cls, value: Any, status: int = 200) -> Response:
        return cls(json.dumps(value, default=str), "application/json", status)

    def set_content(self, content: str | bytes, content_type: str) -> None:
        if not isinstance(content, (str, bytes)) or not isinstance(content_type, str):
            given = (type(content).__name__, type(content_type).__name__)
            raise TypeError(f"set_content: takes content (str or bytes) and content_type (str), got {given}.")
        if "\r" in content_type or "\n" in content_type:
            raise bad_argument("set_content", "content_type", content_type, "one line")
        self.content = content.encode() if isinstance(content, str) else content
        self.content_type = content_type

    def set_status(self, status: int) -> None:
        if not isinstance(status, int):
            raise TypeError(f"set_status: takes an int, got {type(status).__name__}.")
        if not 200 <= status <= 599:
            raise bad_argument("set_status", "status", status, "200 to 599")
        self.status = int(status)
