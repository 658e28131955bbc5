"""The compiled CPU fast path: loaded when a call first could use it, and why it is not there.

``ANCHOR_CACHE_NATIVE=0`` turns it off.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings

from .native_build import build


class _State:
    """What loading came to, once it was tried."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tried = False
        self.library: ctypes.CDLL | None = None
        self.reason: str | None = None


_state = _State()


def _renew_lock() -> None:
    _state.lock = threading.Lock()  # another thread may have held it when the process forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _why_unsupported() -> str | None:
    if os.environ.get("ANCHOR_CACHE_NATIVE") == "0":
        return "ANCHOR_CACHE_NATIVE=0 turns it off"
    if os.name != "posix":
        return f"it is not compiled on {sys.platform}"
    if sys.byteorder != "little" or sys.maxsize < 2**32:
        return "it is written for 64-bit little-endian CPUs"
    return None


def _load() -> None:
    _state.reason = _why_unsupported()
    if _state.reason is None:
        try:
            _state.library = build()
        except FileNotFoundError as error:
            _state.reason = str(error)
        except (RuntimeError, OSError) as error:
            _state.reason = str(error)
            warnings.warn(
                f"{error}\nEverything is computed by PyTorch instead; $CC names another compiler, "
                "ANCHOR_CACHE_NATIVE=0 turns the attempt off.",
                RuntimeWarning,
                stacklevel=2,
            )
    _state.tried = True


def library() -> ctypes.CDLL | None:
    """The compiled library; None if there is none. The first call may compile it."""
    if not _state.tried:
        with _state.lock:
            if not _state.tried:
                _load()
    return _state.library


def why_unavailable() -> str | None:
    """Why there is no compiled library; None if there is one. The first call may compile it."""
    library()
    return _state.reason
