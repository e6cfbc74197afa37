"""``python -m tests.tools.wheels FOLDER``: builds this platform's wheel and the source distribution, and tries them.

`make wheels` calls it in an environment that has build, auditwheel, abi3audit and twine. The wheel is tried in an empty
environment, from a folder without the sources.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRIAL = """
import sys, symcomm

def work(group):
    group.barrier()
    return group.all_gather_object(group.rank)

if __name__ == "__main__":
    assert "site-packages" in symcomm.__file__, symcomm.__file__
    for mode in ("threads", "processes"):
        assert symcomm.spawn(work, 2, mode=mode, deadline=60) == [[0, 1], [0, 1]]
    assert "torch" not in sys.modules and "numpy" not in sys.modules
    print("symcomm", symcomm.__version__, "on Python", sys.version.split()[0])
"""


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def call(*command: str | Path, cwd: Path = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    say("the source distribution, and from it the wheel")
    call(sys.executable, "-m", "build", "--outdir", folder / "raw", ROOT)
    (source,) = (folder / "raw").glob("*.tar.gz")
    (raw,) = (folder / "raw").glob("*.whl")
    say("auditwheel: which systems it runs on")
    call(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, raw)
    (wheel,) = folder.glob("*.whl")
    source = source.rename(folder / source.name)
    shutil.rmtree(folder / "raw")
    return source, wheel


def check_names(wheel: Path) -> None:
    assert re.search(r"-cp310-abi3-manylinux_\d+_\d+_\w+\.whl$", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(archive.read(metadata))
    stray = [name for name in names if name.endswith((".c", ".h", ".o")) or name.startswith(("tests/", "docs/"))]
    assert not stray, stray
    assert {"symcomm/py.typed", "symcomm/_core/_native.pyi", "symcomm/_core/_native.abi3.so"} <= set(names)
    assert any(name.endswith(".html") for name in names), "the page of `symcomm top`"
    assert fields["Requires-Python"] == ">=3.10"
    assert "Programming Language :: Python :: 3.13" in fields.get_all("Classifier", [])


def check_source(source: Path) -> None:
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = (".ci", ".github", "docs", "examples", "tests", "src/symcomm")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    built = (".so", ".o", ".pyc")
    wanted = {str(path.relative_to(ROOT)) for path in files if path.suffix not in built}
    wanted |= {"CHANGELOG.md", "LICENSE", "Makefile", "mkdocs.yml", "constraints.txt", "setup.py", ".clang-format"}
    assert wanted <= names, wanted - names
    assert not [name for name in names if name.endswith(built)]


def try_out(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "env/bin/python")
        call(sys.executable, "-m", "venv", Path(folder, "env"))
        call(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel)
        Path(folder, "trial.py").write_text(TRIAL)
        print(call(python, "trial.py", cwd=Path(folder)), end="")
        call(python.with_name("symcomm"), "--help", cwd=Path(folder))
        call(python.with_name("symcomm"), "run", "-n", "2", "--no-python", "true", cwd=Path(folder))


def main(folder: Path) -> None:
    source, wheel = build(folder)
    check_names(wheel)
    check_source(source)
    say("abi3audit: nothing beyond the limited API of Python 3.10")
    call(sys.executable, "-m", "abi3audit", "--strict", wheel)
    say("twine check")
    call(sys.executable, "-m", "twine", "check", "--strict", source, wheel)
    say("the wheel in an empty environment")
    try_out(wheel)
    for path in (source, wheel):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
