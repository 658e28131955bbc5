"""Moving stored keys to their place: how each layer of a model rotates, found by trying.

Keys are stored as they are before RoPE and rotated once, by the model's own tables for the whole
prompt. That is exact for every kind of rotary embedding, also those whose tables depend on the
length, and nothing is ever rotated twice.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .kernels import ops
from .kernels.ops import RotaryLayout
from .patches.compat import layers_with_keys
from .patches.partial_forward import PartialForward, StopForward, refusal
from .row_check import prefill_agrees, rows_agree

_PROBE_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class LayerRotation(NamedTuple):
    """How a layer rotates what its cache calls keys and values; None: not at all.

    Values are rotated where the cache keeps the rotary part of multi-head latent attention.
    """

    keys: RotaryLayout | None
    values: RotaryLayout | None

    def place(self, held, states, cos, sin, start: int) -> None:
        """Write keys and values ``[1, H_kv, T, D]`` to the positions from ``start`` on of the ones
        ``held``, ``[1, H_kv, L, D]``, rotated by the tables of all positions ``[1, L, R]``."""
        for layout, to, own in zip(self, held, states, strict=True):
            if layout is None:
                to[:, :, start : start + own.shape[2]] = own
            else:
                ops.rotate_into(to, own, cos, sin, start, layout.pairing, layout.table)


class KVRecorder:
    """A cache that keeps what one layer hands it, and stops the layer there if asked."""

    def __init__(self, stop: bool) -> None:
        self.stop = stop
        self.kv: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, key_states, value_states, *args, **kwargs):
        self.kv = (key_states, value_states)
        if self.stop:
            raise StopForward
        return self.kv


_known: weakref.WeakKeyDictionary[PreTrainedModel, list[LayerRotation]] = (
    weakref.WeakKeyDictionary()
)


def find_rotations(model: PreTrainedModel) -> list[LayerRotation]:
    """How every layer of ``model`` rotates keys; probed once per model.

    Raises:
        NotImplementedError: the model, named, adds positions to its embeddings or keys, has layers
            that keep more than keys and values, rotates in a way that is not understood, or gives
            other results for single rows than for the whole prompt.
    """
    if model not in _known:
        try:
            with torch.no_grad():
                _known[model] = _probe(model)
        except NotImplementedError:
            raise
        except Exception as error:
            # Whatever a model does that the probe did not foresee, blending would not survive it.
            why = f"trying out its layers failed with {type(error).__name__}: {error}"
            raise refusal(model, why) from error
    return _known[model]


def _probe(model: PreTrainedModel) -> list[LayerRotation]:
    _require_plain_layers(model)
    tokens = torch.arange(_PROBE_TOKENS // 2, device=model.device)
    tokens %= model.config.get_text_config(decoder=True).vocab_size
    # Each token stands at two places, which positions of any kind would tell apart.
    ids = torch.cat((tokens, tokens.flip(0)))[None]
    forward, elsewhere = (PartialForward(model, ids, first_position=p) for p in (0, 5))
    embedded = forward.embedded
    if not (_equal(embedded, embedded.flip(1)) and _equal(embedded, elsewhere.embedded)):
        raise refusal(model, "it adds positions to its embeddings, so stored keys cannot be moved")
    rotations, hidden, filled = [], forward.embedded, []
    for layer in range(forward.layers):
        plain, moved, rotated = KVRecorder(True), KVRecorder(True), KVRecorder(stop=False)
        forward.run(layer, hidden, None, plain, rotate=False)
        elsewhere.run(layer, hidden, None, moved, rotate=False)
        output = forward.run(layer, hidden, None, rotated)
        if plain.kv is None or rotated.kv is None:
            raise refusal(model, f"layer {layer} keeps no keys and values of its own")
        if not all(_equal(a, b) for a, b in zip(plain.kv, moved.kv, strict=True)):
            raise refusal(
                model,
                f"layer {layer} puts positions into its keys by other means than the rotary tables "
                "it is handed, so stored keys cannot be moved",
            )
        cos, sin = forward.rotary_tables(layer)
        layouts = [_match(a, b, cos, sin) for a, b in zip(plain.kv, rotated.kv, strict=True)]
        if "unknown" in layouts:
            raise refusal(model, f"the rotary embedding of layer {layer} is of no known layout")
        if not rows_agree(forward, layer, hidden, output, rotated.kv):
            raise refusal(
                model,
                f"layer {layer} gives single tokens other results than it gives them among all",
            )
        rotations.append(LayerRotation(*layouts))
        filled.append(rotated.kv)
        hidden = output
    if not prefill_agrees(model, ids, filled):
        raise refusal(model, "its own prefill fills the cache otherwise than its layers in turn")
    return rotations


def _require_plain_layers(model: PreTrainedModel) -> None:
    layers = DynamicCache(config=model.config).layers[: layers_with_keys(model.config)]
    linear = [i for i, layer in enumerate(layers) if hasattr(layer, "update_recurrent_state")]
    if linear:
        raise refusal(
            model,
            f"layers {linear} are linear attention, whose state cannot be recomputed for single "
            "tokens",
        )
    for i, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise refusal(
                model, f"layer {i} keeps more than keys and values, in a {type(layer).__name__}"
            )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Up to what a kernel may round differently in another place."""
    tolerance = max(1e-5, torch.finfo(one.dtype).eps) * one.abs().max()
    return bool((one - other).abs().max() <= tolerance)


def _match(plain, rotated, cos, sin) -> RotaryLayout | str | None:
    if torch.equal(plain, rotated):
        return None
    tolerance = _TOLERANCE.get(plain.dtype, 5e-2) * plain.float().abs().max()
    for layout in ops.ROTARY_LAYOUTS:
        if 2 * layout.pair_table(cos).shape[-1] > plain.shape[-1]:
            continue
        if (ops.rotate(plain, cos, sin, layout) - rotated).abs().max() <= tolerance:
            return layout
    return "unknown"


# What transformers computes once and for all; "dynamic" and "longrope" look at the pass.
_FIXED_TABLES = ("default", "linear", "llama3", "proportional", "yarn")


def tables_are_fixed(model: PreTrainedModel) -> bool:
    """Whether the rotary tables of a position are the same in passes of every length.

    Rope types that are not known are taken for such that change.
    """
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return all(own.get("rope_type") in _FIXED_TABLES for own in per_layer_type or [parameters])
