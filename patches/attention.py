"""Letting a cache decide what attention reads.

``Cache.update`` never sees the query; the attention function does. So ``update`` hands its layer
over (:func:`hand_over`) and the attention functions of transformers are wrapped, under their own
names, by one that asks such a layer what to read. Calls without a layer go straight through, so
other models and caches notice nothing, and masks, softcaps, sinks and every other argument stay
the model's own. The wrapping lasts as long as somebody holds it (:func:`hold_routing`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .chosen_blocks import ChosenBlocks
from .compat import attention_kwargs
from .plain_attention import attend_to_all, is_plain
from .readings import BlockReading, Reading
from .row_groups import RowGroups, RowsInPlace

_HANDLE = "anchor_layer"


class SelectiveLayer(Protocol):
    """A cache layer that may let attention read only a part of it."""

    def read(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        kwargs: dict,
    ) -> Reading | BlockReading | ChosenBlocks | RowGroups | RowsInPlace | None:
        """The part of ``keys`` and ``values``, as the model gives them to its attention, to read
        for ``query`` ``[B, H, T, D]``, or how to go over them; None for all of them at once."""


def hand_over(layer: SelectiveLayer, keys: torch.Tensor, update_kwargs: dict) -> None:
    """Make ``layer`` known to the attention call that follows this ``Cache.update``."""
    kwargs = attention_kwargs(update_kwargs)
    if kwargs is not None:
        kwargs[_HANDLE] = layer
    # The keys say it too: not every version and model hands its arguments over, and layers that
    # share the keys of another one never call `update`. Weak, or the layer and its own keys would
    # keep each other alive.
    setattr(keys, _HANDLE, weakref.ref(layer))


def _taken_over(keys: torch.Tensor, kwargs: dict) -> SelectiveLayer | None:
    layer = kwargs.pop(_HANDLE, None)
    if layer is None and (reference := getattr(keys, _HANDLE, None)) is not None:
        layer = reference()
    return layer


def _eager_of(module: torch.nn.Module) -> Callable:
    """The eager attention of the module's own modeling file: it alone knows the model's extras."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise NotImplementedError(
        f"{type(module).__name__} has no eager attention function in its modeling file; load the "
        "model with attn_implementation='sdpa'"
    )


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a boolean mask is True, and the lowest number elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def _mask_for(name: str, mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A mask in the form that the attention function of this name takes."""
    if mask is None or name == "sdpa":
        return mask
    if "flash" in name or "flex" in name:
        raise NotImplementedError(
            f"attn_implementation={name!r} takes no mask for selected tokens, which coverage, "
            "tolerance, skipped='mean' and selection_heads='query' need; load the model with "
            "attn_implementation='sdpa', or leave these settings at their defaults"
        )
    return additive_mask(mask, query.dtype) if mask.dtype == torch.bool else mask


def _routed(name: str, original: Callable | None) -> Callable:
    """``original`` (None: the module's own eager attention), reading what the layer selects."""

    def forward(module, query, key, value, attention_mask=None, **kwargs):
        attend = original or _eager_of(module)
        layer = _taken_over(key, kwargs)
        if layer is None:
            return attend(module, query, key, value, attention_mask, **kwargs)

        plain = is_plain(attend, kwargs) and query.shape[2] == 1

        def read(key, value, mask):
            if plain and query.device.type == "cpu":
                output = attend_to_all(query, key, value, mask, kwargs.get("scaling"))
                if output is not None:
                    return output, None
            return attend(module, query, key, value, mask, **kwargs)

        reading = layer.read(module, query, key, value, attention_mask, kwargs)
        if reading is None:
            return read(key, value, attention_mask)
        if isinstance(reading, (RowGroups, RowsInPlace)):
            return reading.attend(attend, module, query, key, value, kwargs), None
        if isinstance(reading, ChosenBlocks):
            return reading.attend(attend, module, query, key, value, kwargs)
        if plain and isinstance(reading, BlockReading):
            output = reading.attend(query, kwargs.get("scaling"))
            if output is not None:
                return output, None
        reading = reading.gathered()
        output = read(reading.keys, reading.values, _mask_for(name, reading.mask, query))
        if reading.compare is not None:
            reading.compare(output[0], read(key, value, attention_mask)[0])
        return output

    if original is not None:
        functools.update_wrapper(forward, original)
    forward.is_anchor_routed = True
    return forward


_lock = threading.RLock()  # a finalizer may run while the lock is held
_holders = weakref.WeakSet()
_installed: dict[str, tuple[Callable, Callable | None]] = {}


def _install() -> None:
    for name in ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]:
        current = ALL_ATTENTION_FUNCTIONS.get(name)
        if not getattr(current, "is_anchor_routed", False):
            local = ALL_ATTENTION_FUNCTIONS._local_mapping.get(name)
            ALL_ATTENTION_FUNCTIONS[name] = routed = _routed(name, current)
            _installed[name] = (routed, local)


def _uninstall() -> None:
    for name, (routed, local) in list(_installed.items()):
        # Somebody may have wrapped our wrapper since; it then has to stay under theirs.
        if ALL_ATTENTION_FUNCTIONS._local_mapping.get(name) is routed:
            del ALL_ATTENTION_FUNCTIONS[name]
            if local is not None:
                ALL_ATTENTION_FUNCTIONS[name] = local
        del _installed[name]


def _release() -> None:
    with _lock:
        if not list(_holders):
            _uninstall()


@torch.compiler.disable
def hold_routing(holder: object) -> None:
    """Route attention through handed-over layers for as long as ``holder`` lives. Idempotent."""
    if holder in _holders and len(ALL_ATTENTION_FUNCTIONS) == len(_installed):
        return  # and no attention function was registered since
    with _lock:
        if holder not in _holders:
            _holders.add(holder)
            weakref.finalize(holder, _release).atexit = False
        _install()


def _is_routable(model: PreTrainedModel) -> bool:
    own = getattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    shared = own is None or own is ALL_ATTENTION_FUNCTIONS  # some models have a registry of theirs
    return shared and model._can_set_attn_implementation()


def require_routable(model: PreTrainedModel) -> None:
    """Raise NotImplementedError, by name, for a model that bypasses the attention interface."""
    if not _is_routable(model):
        raise NotImplementedError(
            f"{type(model).__name__} does not route its attention through transformers' attention "
            "interface, so no cache can choose what it reads; use DynamicCache with this model"
        )


class _Scope:
    pass


@contextlib.contextmanager
def anchor_attention(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Patch attention explicitly for a block of code; undone on exit.

    An ``AnchorDynamicCache`` does the same by itself for as long as it lives. The explicit form
    also checks the model first.

    Args:
        model: the model that will generate with an ``AnchorDynamicCache``.

    Raises:
        NotImplementedError: the model does not use transformers' attention interface.

    Example:
        >>> with anchor_attention(model):
        ...     model.generate(**inputs, past_key_values=AnchorDynamicCache())
    """
    require_routable(model)
    scope = _Scope()
    hold_routing(scope)
    try:
        yield model
    finally:
        _holders.discard(scope)
        _release()


def is_patched(model: PreTrainedModel) -> bool:
    """Whether attention calls of ``model`` are routed through handed-over cache layers now."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    routed = getattr(ALL_ATTENTION_FUNCTIONS.get(name), "is_anchor_routed", False)
    return _is_routable(model) and routed
