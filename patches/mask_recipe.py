"""How transformers makes a model's attention masks, written down to make single rows of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS


class MaskRecipe:
    """How transformers would make a layer's mask; makes the rows of chosen positions on demand."""

    def __init__(self, make: Callable, kwargs: dict) -> None:
        self._make, self._kwargs = make, kwargs
        self._last: tuple | None = None  # the layers of a pass ask for the same rows

    def __getattr__(self, name: str):
        raise AttributeError(f"the model changes the masks that transformers makes ({name!r})")

    def full(self) -> torch.Tensor | None:
        """The mask of a pass over all tokens, or None where attention is plainly causal."""
        return self._make(**self._kwargs)

    def rows(self, positions: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        """The rows of ``positions`` ``[R]``: each sees what it sees in a full pass, as far as
        ``visible`` ``[T]`` (None: everything) allows."""
        if self._last is None or self._last[0] is not positions or self._last[1] is not visible:
            self._last = positions, visible, self._rows(positions, visible)
        return self._last[2]

    def _rows(self, positions: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        rule = self._kwargs["mask_function"]

        def row_rule(b, h, q, kv):
            allowed = rule(b, h, positions[q], kv)
            return allowed if visible is None else allowed & visible[kv]

        return self._make(
            **{
                **self._kwargs,
                "q_length": len(positions),
                "q_offset": 0,
                "allow_is_causal_skip": False,
                "mask_function": row_rule,
            }
        )


@contextlib.contextmanager
def recorded_masks(implementation: str):
    """Let mask functions return their recipes, in this thread."""
    owner = threading.get_ident()

    def recorder(*args, **kwargs):
        if threading.get_ident() != owner:
            return make(*args, **kwargs)
        return MaskRecipe(make, kwargs)

    make = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    local = ALL_MASK_ATTENTION_FUNCTIONS._local_mapping.get(implementation)
    ALL_MASK_ATTENTION_FUNCTIONS[implementation] = recorder
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[implementation]
        if local is not None:
            ALL_MASK_ATTENTION_FUNCTIONS[implementation] = local
