"""``python -m tests.support.run_blocks FOLDER``: runs each Python file there by itself, in a process that has
loaded torch, and says how those that fail ended, a zero byte after each.

``print(...)`` must print what the comment behind it shows, with ``...`` for anything; comments in words are skipped."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import runpy
import signal
import sys
import traceback
from pathlib import Path

LIMIT = 180  # seconds for a block: the compiler alone takes 60 on a busy machine


def run_alone(path: Path) -> str:
    """The complaints of a fork that runs the file; "" if all is well."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.alarm(LIMIT)
        said, status = io.StringIO(), 0
        sys.argv = [str(path)]
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                runpy.run_path(str(path), run_name="__main__")
        except SystemExit as error:
            status = int(bool(error.code))
        except BaseException:
            status = 1
            said.write(traceback.format_exc())
        if missing := [] if status else broken_promises(path.read_text(), said.getvalue()):
            status = 1
            said.write(f"\nthis was promised, and not printed: {missing}")
        os.write(writer, said.getvalue()[-3000:].encode())
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"{path.name} ended with {code}:\n{said}" if code else ""


def broken_promises(code: str, printed: str) -> list[str]:
    shown = re.findall(r"^ *print\(.*\) {2,}# (.+)$", code, flags=re.M)
    shown = [text for text in shown if "..." in text or not text[0].isalpha()]  # else it says something in words

    def as_pattern(text: str) -> str:
        return ".*".join(re.escape(part.strip()) for part in text.split("..."))

    return [text for text in shown if not re.search(as_pattern(text), printed, flags=re.S)]


def main(folder: Path) -> int:
    import torch

    importlib.import_module("tests.support.preloaded")
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    failed = [text for path in sorted(folder.glob("*.py")) if (text := run_alone(path))]
    print("\0".join(failed))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
