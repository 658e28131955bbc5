"""One stage of gpu_check.py, in a process of its own.

python examples/gpu_stage.py attention notes.json --seconds 80
"""

from __future__ import annotations

import argparse
import shutil
import sys
import sysconfig
import warnings
from pathlib import Path

# The library of this checkout, also where another one is installed, or none.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import torch
from benchmark_machine import commit, copy_bandwidth, machine, versions
from benchmark_timing import require_that
from gpu_notes import Notes
from gpu_sizes import GPU, REHEARSAL, Sizes

import anchor_cache

_MARGIN = 3.0  # seconds to write down what was measured


def _device(notes: Notes, sizes: Sizes) -> None:
    notes.attempt("versions", versions)
    notes.attempt("commit", commit)
    notes.attempt("library", lambda: str(Path(anchor_cache.__file__).parent))
    notes.attempt("build tools", _build_tools)
    notes.attempt("device", lambda: _about_device(sizes.device))
    notes.attempt("copy_bandwidth", lambda: copy_bandwidth(sizes.device, sizes.copied_bytes))


def _build_tools() -> dict:
    """What Triton and torch.compile need to build their launchers."""
    headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    return {**{name: shutil.which(name) for name in ("cc", "gcc", "g++")}, "Python.h": headers}


def _about_device(device: str) -> dict:
    if device != "cuda":
        return machine(device)
    require_that(torch.cuda.is_available(), f"torch {torch.__version__} finds no CUDA device")
    properties = torch.cuda.get_device_properties(0)
    about = dict(memory_bytes=properties.total_memory, cuda=torch.version.cuda)
    about |= dict(capability=torch.cuda.get_device_capability(0))
    about |= dict(multiprocessors=properties.multi_processor_count)
    return {**machine(device), **about}


def _kernels(notes: Notes, sizes: Sizes, files: list[Path] | None) -> None:
    from gpu_kernel_tests import run_tests

    run_tests(notes, files, sizes is REHEARSAL)


def _stage(name: str):
    """What runs a stage; imported for it alone, so that what one cannot import stops no other."""
    if name == "device":
        return _device
    if name == "attention":
        import gpu_attention

        return gpu_attention.run
    if name == "blending":
        import gpu_blending

        return gpu_blending.run
    import gpu_decoding

    return {"decoding": gpu_decoding.run, "graphs": gpu_decoding.run_graphs}[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage")
    parser.add_argument("notes", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--kernel-tests", type=Path, nargs="+")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    sizes, notes = REHEARSAL if args.rehearse else GPU, Notes(args.notes, args.seconds - _MARGIN)
    if args.stage == "kernels":
        _kernels(notes, sizes, args.kernel_tests)
    else:
        _stage(args.stage)(notes, sizes)
    notes.write(finished=True)


if __name__ == "__main__":
    main()
