"""Running chosen token positions through the model's own decoder layers, one layer at a time.

A dry run of the model, with every decoder layer replaced by one that only writes down how it was
called, yields what each layer needs: rotary tables, the recipe of its mask, whatever else the
model hands over. The real layers are then called with the rows of the chosen positions. No forward
is copied and nothing depends on a model's name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from .compat import cache_keyword, layers_with_keys
from .mask_recipe import MaskRecipe, recorded_masks
from .rotary_tables import cos_sin, no_rotation

_ROW_MASKS = ("eager", "sdpa")


class StopForward(Exception):
    """Raised by a cache's ``update`` when nothing after it is needed in this layer."""


@dataclasses.dataclass
class _Call:
    """How the model calls one of its decoder layers."""

    layer: torch.nn.Module
    hidden: torch.Tensor
    kwargs: dict


class _LayerOutput(torch.Tensor):
    """Hidden states that a model may take for the tensor or for the tuple that a layer returns."""

    def __getitem__(self, index):
        return self if isinstance(index, int) and index == 0 else super().__getitem__(index)


class _RowsCache:
    """What a layer sees of a cache while it computes chosen rows."""

    def __init__(self, cache: Any, seen: torch.Tensor | int) -> None:
        self.update, self._seen = cache.update, seen

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor | int:
        """How many tokens precede the rows, per row where it differs: layers that count positions
        themselves add it to each row's place among the rows."""
        return self._seen


def refusal(model: PreTrainedModel, why: str) -> NotImplementedError:
    """The error for a model that cannot be blended, by name, and why."""
    return NotImplementedError(f"{type(model).__name__} cannot be blended: {why}")


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The model's decoder layers, in order.

    Raises:
        NotImplementedError: no list of as many modules as the configuration has layers.
    """
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == depth:
            return list(module)
    raise refusal(model, f"no list of its {depth} decoder layers was found")


@contextlib.contextmanager
def _replaced(target: Any, name: str, value: Any):
    """Set an instance attribute for a while, whether or not it hides one of the class."""
    own = vars(target).get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        delattr(target, name)
        if own is not None:
            setattr(target, name, own)


# A dry run changes the model and a registry for all threads; others are sent on to the originals.
DRY_RUN = threading.RLock()


def _named(forward: Callable, args: tuple) -> dict:
    """Positional arguments that follow the hidden states, by the names of ``forward``."""
    if not args:
        return {}
    names = [
        n
        for n, p in inspect.signature(forward).parameters.items()
        if p.kind == p.POSITIONAL_OR_KEYWORD
    ]
    return dict(zip(names[1 : 1 + len(args)], args, strict=True))


def _record_calls(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor):
    calls: list[_Call] = []
    owner = threading.get_ident()
    # Layers after them, if any, read the keys and values of these and nothing reads theirs.
    needed = layers_with_keys(model.config)

    def recorder(layer):
        original = layer.forward

        def forward(hidden_states, *args, **kwargs):
            if threading.get_ident() != owner:
                return original(hidden_states, *args, **kwargs)
            hidden = hidden_states.as_subclass(torch.Tensor)
            calls.append(_Call(layer, hidden, {**_named(original, args), **kwargs}))
            if len(calls) == needed:
                raise StopForward
            return hidden.as_subclass(_LayerOutput)

        return forward

    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation not in _ROW_MASKS:
        raise refusal(
            model,
            f"attn_implementation={implementation!r} takes no mask of single rows; load the model "
            f"with one of {', '.join(_ROW_MASKS)}",
        )
    with DRY_RUN, contextlib.ExitStack() as stack:
        stack.enter_context(recorded_masks(implementation))
        for layer in decoder_layers(model):
            stack.enter_context(_replaced(layer, "forward", recorder(layer)))
        stack.enter_context(contextlib.suppress(StopForward))
        model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False)
    return calls


class PartialForward:
    """The way of prompts through a model's decoder layers, for any subset of their positions.

    Args:
        model: a decoder-only model whose layers receive their rotary tables.
        ids: token ids ``[B, T]``; shorter prompts are padded on the right, where causal attention
            keeps whatever stands there from reaching what comes before it.
        first_position: position of the first token.

    Raises:
        NotImplementedError: the model, named, does not fit, and why.
    """

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, first_position: int = 0) -> None:
        self.tokens = ids.shape[1]
        self._first = first_position
        positions = torch.arange(first_position, first_position + self.tokens, device=ids.device)
        self._calls = _record_calls(model, ids, positions[None])
        hidden = self._calls[0].hidden
        for i, call in enumerate(self._calls):
            if call.hidden.data_ptr() != hidden.data_ptr() or call.hidden.shape != hidden.shape:
                raise refusal(model, f"layer {i} does not get the hidden states of the one before")
            if cache_keyword(call.kwargs) is None:
                raise refusal(model, f"layer {i} is not handed the cache")
        # Tokens second, also where the model keeps several hidden states per token.
        self.embedded = hidden.movedim(-2, 1)

    @property
    def layers(self) -> int:
        """How many decoder layers keep keys and values of their own: the first ones."""
        return len(self._calls)

    def rotary_tables(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's cos and sin for all tokens, ``[1, T, R]`` (complex tables are split); R is 0
        where the layer is handed none."""
        tables = self._calls[layer].kwargs.get("position_embeddings")
        if tables is None:
            empty = self.embedded.new_empty(1, self.tokens, 0)
            return empty, empty
        return (tables.real, tables.imag) if isinstance(tables, torch.Tensor) else cos_sin(tables)

    def rotary_digest(self, tokens: int | None = None) -> str:
        """A digest of all layers' tables for the first ``tokens`` positions (None: all)."""
        digest, seen = hashlib.sha256(), set()
        for call in self._calls:
            tables = call.kwargs.get("position_embeddings")
            if tables is not None and id(tables) not in seen:
                seen.add(id(tables))
                for table in [tables] if isinstance(tables, torch.Tensor) else tables:
                    own = torch.view_as_real(table) if table.is_complex() else table
                    digest.update(own[:, :tokens].float().cpu().numpy().tobytes())
        return digest.hexdigest()

    def run(
        self,
        layer: int,
        hidden: torch.Tensor,
        rows: torch.Tensor | None,
        cache: Any,
        *,
        rotate: bool = True,
        visible: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Call the model's own layer.

        Args:
            layer: which.
            hidden: hidden states of the rows, ``[B, R, D]``, or of the form of ``embedded``.
            rows: their indices ``[R]``, ascending; None for all tokens.
            cache: its ``update`` receives the rows' keys and values and returns those of all
                tokens; it may raise :class:`StopForward`.
            rotate: False leaves queries and keys as they are before RoPE.
            visible: tokens ``[T]`` that the rows may attend to at all; None for all.

        Returns:
            The layer's output for the rows, or None if it was stopped.
        """
        call = self._calls[layer]
        kwargs = {n: self._of_rows(value, rows, visible) for n, value in call.kwargs.items()}
        kwargs[cache_keyword(kwargs)] = _RowsCache(cache, self._seen(rows))
        if not rotate and kwargs.get("position_embeddings") is not None:
            kwargs["position_embeddings"] = no_rotation(kwargs["position_embeddings"])
        try:
            output = call.layer(hidden.movedim(1, -2), **kwargs)
        except StopForward:
            return None
        return (output if isinstance(output, torch.Tensor) else output[0]).movedim(-2, 1)

    def _seen(self, rows: torch.Tensor | None) -> torch.Tensor | int:
        if rows is None:
            return self._first
        return self._first + rows - torch.arange(len(rows), device=rows.device)

    def _of_rows(self, value: Any, rows: torch.Tensor | None, visible=None) -> Any:
        if isinstance(value, MaskRecipe):
            return value.full() if rows is None else value.rows(rows, visible)
        if rows is None:
            return value
        if isinstance(value, tuple):
            return tuple(self._of_rows(item, rows) for item in value)
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == self.tokens:
            return value.index_select(1, rows)
        return value
