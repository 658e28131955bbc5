"""Tiny random models of real classes, one per trait that matters to a cache."""

import torch
from tiny_models import ALL_FAMILIES, BYPASSING, tiny_family, tiny_model

__all__ = ["ALL_FAMILIES", "BYPASSING", "FAMILIES", "random_ids", "tiny_family", "tiny_model"]

# The few that tests of every feature go through; test_families.py goes through all.
_FEW = ("llama", "qwen3", "gemma3", "phi3", "gpt_neox", "gpt_oss")
FAMILIES = {name: ALL_FAMILIES[name] for name in _FEW}


def random_ids(*shape, low=2, high=96):
    """Token ids that are neither padding nor beginning of text."""
    return torch.randint(low, high, shape)
