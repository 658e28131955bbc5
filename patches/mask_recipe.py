"""How transformers makes a model's attention masks, written down to make single rows of them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function


class RowPattern(NamedTuple):
    """What rows see where it can be said in few words: the tokens up to their own.

    positions: of the rows ``[R]``, ascending.
    window: only the newest so many; None for all.
    visible: ``[T]``, False for tokens that nobody sees; None when all are seen.
    """

    positions: torch.Tensor
    window: int | None
    visible: torch.Tensor | None


class RowMask(torch.Tensor):
    """A mask of rows that is made when something first looks at it: attention that goes by its
    ``pattern`` never needs it."""

    pattern: RowPattern

    @classmethod
    def of(cls, pattern: RowPattern, make: Callable[[], torch.Tensor]) -> RowMask:
        """A mask of this pattern, which ``make`` makes."""
        mask = torch.empty(0).as_subclass(cls)
        mask.pattern, mask.made = pattern, functools.cache(make)
        return mask

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda mask: mask.made(), (args, kwargs or {}))
        return func(*args, **kwargs)


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
            made = functools.partial(self._rows, positions, visible)
            if self._local[0]:
                made = functools.partial(
                    RowMask.of, RowPattern(positions, self._local[1], visible), made
                )
            self._last = positions, visible, made()
        return self._last[2]

    @functools.cached_property
    def _local(self) -> tuple[bool, int | None]:
        """Whether rows see the tokens up to their own and no others, and how many of these.

        Where transformers may leave out the mask of a short prompt, nothing is mixed into the rule:
        it is causal, or causal within ``local_size`` tokens, sliding or in chunks.
        """
        given = self._kwargs
        size, rule = given.get("local_size"), given["mask_function"]
        moved = given.get("q_offset") or given.get("kv_offset")
        if (
            not given.get("allow_is_causal_skip")
            or given.get("attention_mask") is not None
            or moved
        ):
            return False, None
        if size is None:
            return rule is causal_mask_function, None
        # The first token of the second chunk is the one that tells them apart.
        row, near, far = (torch.tensor(i, device=given.get("device")) for i in (size, 1, 0))
        head = torch.zeros_like(row)
        return bool(rule(head, head, row, near) & ~rule(head, head, row, far)), size

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
