"""Where keys and values are kept: on the model's device, on the host, on the disk."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedConfig

from .anchor_config import AnchorConfig
from .block_storage import GrowingStates
from .host_states import HostStates
from .mapped_states import MappedStates


def new_storage(config: AnchorConfig) -> GrowingStates:
    """Empty storage for the keys or the values of one layer."""
    if config.offload == "disk":
        return MappedStates(config.offload_dir)
    if config.offload == "cpu":
        return HostStates(config.read_tokens)
    return GrowingStates()


def require_offloadable(config: AnchorConfig, model_config: PreTrainedConfig | None) -> None:
    """Raise NotImplementedError for a model whose layers are never sparse, if its keys would have
    to be copied back to the accelerator, whole, in every step."""
    if config.offload != "cpu" or model_config is None:
        return
    if getattr(model_config.get_text_config(decoder=True), "kv_lora_rank", None):
        raise NotImplementedError(
            "offload='cpu' does not work with multi-head latent attention (the configuration has "
            "kv_lora_rank): its keys are expanded after the cache, so every step needs all of "
            "them; use offload=None, or 'disk' on a CPU"
        )


def describe(config: AnchorConfig, storages: Iterable[GrowingStates]) -> str:
    """One line about where keys and values are; empty without offload."""
    storages = [storage for storage in storages if not storage.is_empty]
    if config.offload is None or not storages:
        return ""
    total, on_device = (
        f"{sum(getattr(storage, name) for storage in storages) / 2**20:.2f} MiB"
        for name in ("nbytes", "device_bytes")
    )
    if config.offload == "disk":
        place = config.offload_dir or "the directory for temporary files"
        return f"offload='disk': {total} of keys and values in files in {place}"
    if not any(storage.is_remote for storage in storages):
        return "offload='cpu' has nothing to offload: the model is on the CPU"
    return f"offload='cpu': {total} of keys and values on the host, {on_device} on the accelerator"
