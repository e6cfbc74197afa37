"""Builds the one C extension. Everything else about the package is in pyproject.toml.

``SYMCOMM_WERROR=1`` turns warnings into errors; ``SYMCOMM_SANITIZE=address,undefined`` (or ``thread``)
builds the extension with those sanitizers.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CORE = Path("src/symcomm/_core")

compile_args = ["-std=gnu11", "-O3", "-g1", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
link_args = ["-pthread"]
if os.environ.get("SYMCOMM_WERROR") == "1":
    compile_args.append("-Werror")
if sanitize := os.environ.get("SYMCOMM_SANITIZE"):
    flags = [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-O1"]
    compile_args += flags
    link_args += flags


class BuildSideBySide(build_ext):
    """Compiles as many sources at once as there are cores."""

    def build_extensions(self) -> None:
        compile_some = self.compiler.compile

        def compile_all(sources, *args, **more):
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                objects = pool.map(lambda source: compile_some([source], *args, **more), sources)
                return [one for some in objects for one in some]

        self.compiler.compile = compile_all
        super().build_extensions()


setup(
    cmdclass={"build_ext": BuildSideBySide},
    ext_modules=[
        Extension(
            "symcomm._core._native",
            sources=sorted(str(p) for p in CORE.rglob("*.c")),
            depends=sorted(str(p) for p in CORE.rglob("*.h")),
            include_dirs=[str(CORE)],
            define_macros=[("Py_LIMITED_API", "0x030A0000"), ("_GNU_SOURCE", "1")],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
