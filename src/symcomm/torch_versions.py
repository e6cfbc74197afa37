"""The versions of torch that the tests have passed on (see docs/reference/compatibility.md). Loads nothing."""

from __future__ import annotations

TESTED = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
OLDEST, NEWEST = TESTED[0], TESTED[-1]


def release(version: str) -> tuple[int, int]:
    """("2.15.0+cu132") -> (2, 15): corrections of a release change no interface."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
