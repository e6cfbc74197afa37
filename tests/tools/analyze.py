"""GCC's static analyzer over the C core: ``make analyze``. Any warning fails the run but those listed here.

The kernels' files are left out: they are stamped out of macros, take minutes each, and have no memory to lose.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "src" / "symcomm" / "_core"
KERNELS = {"avx2.c", "avx512.c", "avx512_wide.c", "baseline.c", "bf16.c", "fp16.c"}
FLAGS = ["-std=gnu11", "-fanalyzer", "-Wall", "-Wextra", "-DPy_LIMITED_API=0x030A0000", "-D_GNU_SOURCE=1"]

# File, function, warning: why it is none.
KNOWN = {
    ("p2p/progress.c", "copy", "-Wanalyzer-malloc-leak"): "a message set aside lies in struct incoming, which keeps it",
    ("p2p/progress.c", "take_outside", "-Wanalyzer-malloc-leak"): "the same",
    ("sync/cores.c", "free_quotas", "-Wanalyzer-malloc-leak"): "it frees all strings of an array, of unknown length",
    ("store/server.c", "buffer_append", "-Wanalyzer-malloc-leak"): "the buffer lies in a connection, which keeps it",
    ("store/server.c", "on_readable", "-Wanalyzer-malloc-leak"): "the buffer lies in a connection, which keeps it",
}


def analyze(path: Path) -> list[tuple[str, str, str, str]]:
    """What the analyzer says of a file: file, function, warning, its text."""
    include = [f"-I{CORE}", f"-I{sysconfig.get_path('include')}"]
    command = ["gcc", *FLAGS, *include, "-c", "-o", "/dev/null", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"})
    function, found = "", []
    for line in done.stderr.splitlines():
        if inside := re.search(r": In function '(\w+)':", line):
            function = inside[1]
        if warning := re.search(r"warning: .*\[(-W[\w-]+)\]", line):
            found.append((path.relative_to(CORE).as_posix(), function, warning[1], line))
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return found


def main() -> int:
    files = sorted(p for p in CORE.rglob("*.c") if p.name not in KERNELS)
    with ThreadPoolExecutor(2) as pool:
        found = [one for several in pool.map(analyze, files) for one in several]
    new = [text for *where, text in found if tuple(where) not in KNOWN]
    print(*new, sep="\n", end="\n" if new else "")
    print(f"{len(files)} files: {len(new)} warnings, {len(found) - len(new)} known ones")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
