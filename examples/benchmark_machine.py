"""What a benchmark ran on: machine, versions, memory, and how fast memory is."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from benchmark_timing import synchronize

_PACKAGES = ("torch", "transformers", "triton")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(device: torch.device | str = "cpu") -> dict:
    """Processor, cores, threads, memory and, for ``device="cuda"``, the accelerator."""
    about = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "accelerator": None,
    }
    if torch.device(device).type == "cuda":
        about["accelerator"] = torch.cuda.get_device_name(device)
    return about


def versions() -> dict[str, str | None]:
    """Of Python and the packages that decide the speed; None for those that are not here."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """The checked-out commit, with "+" if files were changed since; None outside of a checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=here, check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def copy_bandwidth(device: torch.device | str = "cpu", size: int = 1 << 29) -> float:
    """Bytes per second, read and written ones together, of copying ``size`` bytes; the median of
    five times, after two that touch the memory."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(7):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size / statistics.median(seconds[2:])


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def _give_back() -> None:
    """Return freed memory to the system; the C library otherwise keeps what it may use again."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak_memory(work: Callable[[], object], device: torch.device | str = "cpu") -> int | None:
    """Bytes by which ``work`` raises the memory in use, at its peak: of the accelerator, or of
    the process (its resident set). None where the system cannot tell."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    _give_back()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident set
        before = _status("VmRSS")
    except (OSError, LookupError):
        work()
        return None
    work()
    return _status("VmHWM") - before


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that can still be allocated."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
