"""Bytes, bandwidths and times as people write them."""

from __future__ import annotations

import re

from symcomm.errors import bad_argument

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?)"


def parse_bytes(call: str, argument: str, text: str) -> int:
    """``8``, ``64K``, ``25M``, ``1G``, ``1.5GiB`` -> bytes, in powers of 1024 as in ``symcomm bench``."""
    found = re.fullmatch(rf"{_NUMBER}\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    nbytes = round(float(found[1]) * _BINARY[found[2].upper()]) if found else 0
    if nbytes < 1:
        raise bad_argument(call, argument, text, "a number of bytes such as 8, 64K, 25M or 1G")
    return nbytes


def parse_bandwidth(call: str, argument: str, text: str) -> float:
    """``100Gb/s`` (bits) or ``12.5GB/s`` (bytes) -> bytes a second, in powers of 1000 as networks are sold."""
    found = re.fullmatch(rf"{_NUMBER}\s*([KMGTkmgt]?)(b|B|bit)(?:/s|ps)?", text.strip())
    rate = float(found[1]) * _DECIMAL[found[2].upper()] / (1 if found[3] == "B" else 8) if found else 0.0
    if rate <= 0:
        raise bad_argument(call, argument, text, "a rate such as 100Gb/s (bits) or 12.5GB/s (bytes)")
    return rate


def parse_seconds(call: str, argument: str, text: str) -> float:
    """``500ns``, ``2us``, ``1.5ms``, ``1s`` -> seconds."""
    found = re.fullmatch(rf"{_NUMBER}\s*(ns|us|ms|s)", text.strip())
    if not found:
        raise bad_argument(call, argument, text, "a time such as 500ns, 2us or 1.5ms")
    return float(found[1]) * _TIMES[found[2]]


def format_time(seconds: float) -> str:
    """Three digits and a unit: 1.13 us, 23.4 ms, 1.20 s."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor:
            value = seconds / factor
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def bus_factor(collective: str, world: int) -> float:
    """By what nccl-tests multiply size / time, so that it is comparable with what memory or a link can do."""
    if collective == "all_reduce":
        return 2 * (world - 1) / world
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (world - 1) / world
    return 1.0
