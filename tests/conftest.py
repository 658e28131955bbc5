import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU, Triton's kernels are tested in its interpreter, which has to be known before they
# are imported. CPU tensors get there only if a test asks for it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))


@pytest.fixture(autouse=True)
def seeded_without_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def small_model():
    """The real pretrained model, in fp32, with its tokenizer."""
    from small_model import load

    return load(dtype="float32")


@pytest.fixture
def ranks_few(monkeypatch):
    """In short contexts, too, let the anchors propose what is ranked again."""
    from anchor_cache import selection

    monkeypatch.setattr(selection, "_ALWAYS_RANKED", 0)
    selection.plan_step.cache_clear()
    yield
    selection.plan_step.cache_clear()
