"""What a stage of gpu_check.py has measured so far, in a file that is whole at every moment."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch


class Incomplete(Exception):
    """Something was wrong, and yet there is a ``result`` that must not be lost."""

    def __init__(self, wrong: str, result: object) -> None:
        super().__init__(wrong)
        self.result = result


class Notes:
    """Results, errors and omissions of a stage, written whenever there is a new one.

    Args:
        path: the file.
        seconds: that the stage may take.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self._end = path, time.monotonic() + seconds
        self.results: dict[str, object] = {}
        self.errors: dict[str, str] = {}
        self.omitted: dict[str, str] = {}
        self.write()

    def write(self, finished: bool = False) -> None:
        said = dict(results=self.results, errors=self.errors, omitted=self.omitted)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(dict(said, finished=finished), default=str), "utf-8")
        partial.replace(self.path)

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def attempt(self, name: str, work: Callable[[], object], needs: float = 0.0) -> None:
        """Note what ``work`` returns, or how it fails; omitted with less than ``needs`` seconds
        left."""
        if self.seconds_left < needs:
            self.omitted[name] = f"{self.seconds_left:.0f} s left, {needs:.0f} s wanted"
            self.write()
            return
        try:
            self.results[name] = work()
        except Exception as error:
            traceback.print_exc()
            # Without what the frames hold, which may be most of the device's memory.
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, Incomplete):
                self.results[name] = error.result
            self.errors[name] = f"{type(error).__name__}: {error}"[:2000]
        self.write()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
