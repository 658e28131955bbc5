"""Compiling the C sources in ``csrc/`` on the machine that runs them, once.

The result is kept in a folder of the user's under a name that says what it was made from, so that
it is made anew for other sources, compilers and CPUs, and may be made by several processes at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

SOURCES = Path(__file__).parent / "csrc"
# Infinities and nan keep their meaning, and sums their order: the vectors are written out.
FLAGS = (
    "-std=gnu11 -O3 -fno-math-errno -fno-trapping-math -fno-signed-zeros -ffp-contract=fast "
    "-fPIC -fvisibility=hidden -w"
).split()
_SECONDS = 300
_LINES = 8


class Compiler(NamedTuple):
    """command: with arguments, if ``$CC`` has any. version: what it says of itself."""

    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler | None:
    """``$CC``, or the first of cc, gcc and clang that runs; None if there is none."""
    named = os.environ.get("CC")
    for candidate in [shlex.split(named)] if named else [["cc"], ["gcc"], ["clang"]]:
        if candidate and shutil.which(candidate[0]):
            command = [shutil.which(candidate[0]), *candidate[1:]]
            result = _run([*command, "--version"])
            if result.returncode == 0:
                return Compiler(tuple(command), result.stdout)
    return None


def _run(command: list[str]) -> subprocess.CompletedProcess:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def cpu_name() -> str:
    """What code made for this very CPU depends on."""
    parts = [platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    wanted = ("flags", "Features", "model name", "CPU part", "CPU implementer", "isa")
    return "\n".join(parts + [line for line in lines if line.startswith(wanted)])


def _tuning() -> list[str]:
    return ["-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"]


def torch_openmp(compiler: Compiler) -> Path | None:
    """The OpenMP library in torch's own folder that this compiler's code can call."""
    folder = Path(torch.__file__).parent / "lib"
    names = ("libomp*", "libiomp5*") if "clang" in compiler.version else ("libgomp*", "libiomp5*")
    found = (path for name in names for path in sorted(folder.glob(name)))
    return next((path for path in found if ".so" in path.name or path.suffix == ".dylib"), None)


class Recipe(NamedTuple):
    """How to compile and to link."""

    compile: tuple[str, ...]
    link: tuple[str, ...]

    def make(self, compiler: Compiler, folder: Path) -> tuple[Path | None, str]:
        """Compile in ``folder``: the library, or None and what the compiler said."""
        made, library = folder / "native.o", folder / "native.so"
        source = str(SOURCES / "native.c")
        for command in (
            [*compiler.command, *self.compile, "-c", source, "-o", str(made)],
            [*compiler.command, "-shared", str(made), *self.link, "-o", str(library)],
        ):
            result = _run(command)
            if result.returncode:
                said = (result.stderr or result.stdout).strip().splitlines()
                return None, "\n".join([shlex.join(command), *said[-_LINES:]])
        return library, ""


def recipes(compiler: Compiler, tuning: list[str] | None = None) -> Iterator[Recipe]:
    """The ways to compile, the best first: with torch's threads, with the compiler's own, with
    none; for this CPU, or for any of its kind.

    Threads are torch's own so that no second set of them waits for work beside it.
    """
    own = torch_openmp(compiler)
    apple = sys.platform == "darwin" and "clang" in compiler.version
    openmp = ["-Xpreprocessor", "-fopenmp"] if apple else ["-fopenmp"]
    threads = [] if own is None else [(openmp, [str(own)])]
    threads += [(["-fopenmp"], ["-fopenmp"]), ([], [])]
    for tuned in (_tuning(), []) if tuning is None else (tuning,):
        for compile_flags, link_flags in threads:
            yield Recipe((*FLAGS, *tuned, *compile_flags), tuple(link_flags))


def library_name(compiler: Compiler, recipe: Recipe) -> str:
    """A file name with a hash of all that the library is made from."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (compiler, recipe, cpu_name(), torch.__version__, sys.platform):
        digest.update(repr(part).encode() + b"\0")
    return f"native-{digest.hexdigest()[:32]}.so"


def cache_folder() -> Path | None:
    """Where libraries are kept: ``native`` in ``$ANCHOR_CACHE_HOME`` or ~/.cache/anchor_cache.

    None if nothing can be kept there, or if anybody else could have put something there: what lies
    in it is executed.
    """
    try:
        home = os.environ.get("ANCHOR_CACHE_HOME") or Path.home() / ".cache" / "anchor_cache"
        folder = Path(home) / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_private(folder) and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):
        return None


def _is_private(path: Path) -> bool:
    state = path.stat()
    return state.st_uid == os.geteuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def build(tuning: list[str] | None = None) -> ctypes.CDLL:
    """The library, from the folder of kept ones or made now.

    Args:
        tuning: flags that say for which CPU; None for this one.

    Raises:
        FileNotFoundError: there is no C compiler.
        RuntimeError: compiling or loading failed; the message ends with the compiler's last lines.
    """
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("CC")
        looked_for = f"$CC={named!r}" if named else "cc, gcc or clang"
        raise FileNotFoundError(f"no C compiler runs here ({looked_for})")
    kept, failures = cache_folder(), []
    for recipe in recipes(compiler, tuning):
        for folder in (kept, None) if kept else (None,):
            try:
                library, said = _build_in(folder, compiler, recipe)
            except OSError as error:  # a full disk, or one that nothing can be executed from
                failures.append(str(error))
                continue
            if library is not None:
                return library
            failures.append(said)
            break
    raise RuntimeError(f"compiling the CPU fast path failed: {failures[0]}")


def _build_in(
    kept: Path | None, compiler: Compiler, recipe: Recipe
) -> tuple[ctypes.CDLL | None, str]:
    """The library from a folder of kept ones; without one, made for this process only."""
    with tempfile.TemporaryDirectory(dir=kept, prefix="making-") as scratch:
        target = (kept or Path(scratch)) / library_name(compiler, recipe)
        if not (target.is_file() and _is_private(target)):
            made, said = recipe.make(compiler, Path(scratch))
            if made is None:
                return None, said
            made.chmod(0o700)  # whatever the umask
            os.replace(made, target)
        return ctypes.CDLL(str(target)), ""
