"""Compiling on first use: kept, shared, and left alone where it cannot be."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from anchor_cache.kernels import native, native_build, ops
from anchor_cache.kernels.ops import use_implementation

ROOT = Path(__file__).resolve().parent.parent

# The kernels import nothing of the library; without it a process starts sooner.
ALONE = """
import sys, types
package = types.ModuleType("alone")
package.__path__ = [sys.argv[1]]
sys.modules["alone"] = package
from alone import native
assert native.why_unavailable() is None, native.why_unavailable()
with open("/proc/self/maps") as maps:
    libraries = {line.split()[-1] for line in maps if "omp" in line and "/" in line}
print(len([path for path in libraries if "libgomp" in path or "libomp" in path]))
"""

needs_compiler = pytest.mark.skipif(
    native_build.find_compiler() is None, reason="no C compiler runs here"
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a process that has not tried yet, with an empty cache folder."""
    monkeypatch.setenv("ANCHOR_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(native, "_state", native._State())
    return tmp_path / "home" / "native"


def compiler_that(tmp_path, script):
    path = tmp_path / "some-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def computed_by_pytorch():
    states = torch.randn(1, 1, 8, 16)
    arguments = (torch.randn(1, 2, 16), states, states, torch.tensor([[[0, 1]]]), 4, 1.0)
    with use_implementation("reference"):
        expected = ops.attend_blocks(*arguments)
    torch.testing.assert_close(ops.attend_blocks(*arguments), expected, rtol=0, atol=0)
    return ops.attend_blocks.explain(*arguments)["native"]


@needs_compiler
@pytest.mark.parametrize("umask", [0o022, 0o002])
def test_a_library_is_made_once(fresh, monkeypatch, umask):
    before = os.umask(umask)
    try:
        assert native.why_unavailable() is None
    finally:
        os.umask(before)
    (made,) = fresh.iterdir()
    before = made.stat().st_mtime_ns
    monkeypatch.setattr(native, "_state", native._State())
    assert native.why_unavailable() is None
    (kept,) = fresh.iterdir()
    assert kept == made and kept.stat().st_mtime_ns == before


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc/self/maps")
def test_several_processes_may_make_it_at_once_and_threads_are_torchs_own(fresh):
    command = [sys.executable, "-c", ALONE, str(ROOT / "kernels")]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        assert int(output) <= 1
    assert len(list(fresh.iterdir())) == 1


def test_without_a_compiler_pytorch_computes(fresh, monkeypatch, recwarn):
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in computed_by_pytorch()
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(native, "_state", native._State())
    assert "no-such-compiler" in native.why_unavailable()
    assert not recwarn.list


def test_a_compiler_that_fails_is_heard_once(fresh, monkeypatch, tmp_path):
    script = 'case "$1" in --version) echo some 1.0;; *) echo "disk on fire" >&2; exit 3;; esac'
    monkeypatch.setenv("CC", compiler_that(tmp_path, script))
    with pytest.warns(RuntimeWarning, match="disk on fire") as warned:
        assert "disk on fire" in native.why_unavailable()
        assert "disk on fire" in computed_by_pytorch()
    assert len(warned) == 1
    assert not list(fresh.iterdir())


@needs_compiler
def test_flags_that_a_compiler_does_not_know_are_left_out(fresh, monkeypatch, tmp_path):
    real = native_build.find_compiler().command[0]
    script = (
        'for flag; do case "$flag" in -fopenmp|-m*=native) echo "unknown $flag" >&2; exit 1;; '
        f'esac; done; exec {real} "$@"'
    )
    monkeypatch.setenv("CC", compiler_that(tmp_path, script))
    with use_implementation("native"):
        states = torch.randn(1, 1, 8, 16)
        ops.attend_blocks(states[:, :, 0], states, states, torch.tensor([[[0, 1]]]), 4, 1.0)


@needs_compiler
@pytest.mark.parametrize("fault", ["writable by others", "a file", "not to be executed"])
def test_a_folder_that_cannot_be_trusted_or_used_holds_nothing(fresh, monkeypatch, fault):
    if fault == "a file":
        fresh.parent.write_text("")
    elif fault == "writable by others":
        fresh.mkdir(parents=True)
        fresh.chmod(0o777)
    else:  # as on a disk that nothing can be executed from
        load = native_build.ctypes.CDLL

        def refuse(path):
            if str(path).startswith(str(fresh)):
                raise OSError("failed to map segment")
            return load(path)

        monkeypatch.setattr(native_build.ctypes, "CDLL", refuse)
    assert native.why_unavailable() is None
    if fault == "writable by others":
        assert not list(fresh.iterdir())


@needs_compiler
def test_a_kept_file_that_others_can_write_is_made_anew(fresh, monkeypatch):
    assert native.why_unavailable() is None
    (made,) = fresh.iterdir()
    content = made.read_bytes()
    made.unlink()
    made.write_bytes(b"something else")
    made.chmod(0o666)
    monkeypatch.setattr(native, "_state", native._State())
    assert native.why_unavailable() is None
    assert not made.stat().st_mode & 0o022 and made.stat().st_size == len(content)


def test_it_can_be_turned_off(fresh, monkeypatch):
    monkeypatch.setenv("ANCHOR_CACHE_NATIVE", "0")
    assert "ANCHOR_CACHE_NATIVE=0" in computed_by_pytorch()
    assert not fresh.exists()


def test_names_differ_with_sources_flags_and_compiler(fresh, monkeypatch, tmp_path):
    compiler = native_build.Compiler(("cc",), "some 1.0")
    first, *others = native_build.recipes(compiler)
    names = {native_build.library_name(compiler, recipe) for recipe in (first, *others)}
    names.add(native_build.library_name(compiler._replace(version="some 1.1"), first))
    shutil.copytree(native_build.SOURCES, tmp_path / "csrc")
    (tmp_path / "csrc" / "vectors.h").write_text("/* other */")
    monkeypatch.setattr(native_build, "SOURCES", tmp_path / "csrc")
    names.add(native_build.library_name(compiler, first))
    monkeypatch.setattr(native_build, "cpu_name", lambda: "another")
    names.add(native_build.library_name(compiler, first))
    assert len(names) == 1 + len(others) + 3
