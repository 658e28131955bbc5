"""Caches that plug into transformers' ``generate``, nothing to train.

* :class:`AnchorDynamicCache`: long contexts; each decoding step reads only the blocks of the KV
  cache that matter, found through a small index of anchor vectors.
  :class:`AnchorStaticCache` does so in buffers of fixed capacity, for compiled decoding.
* :class:`BlendedCache`: RAG; joins the stored KV caches of documents and recomputes only the
  tokens that deviate most (CacheBlend).
"""

from pathlib import Path as _Path

_ROOT = _Path(__file__).resolve().parent.parent
if not (_Path(__file__).parent / "kernels").is_dir() and (_ROOT / "setup.cfg").is_file():
    # Running from a checkout: kernels/ and patches/ lie beside this package (see setup.cfg).
    __path__.append(str(_ROOT))

from .anchor_config import AnchorConfig  # noqa: E402
from .anchor_dynamic_cache import AnchorDynamicCache  # noqa: E402
from .anchor_layer import AnchorLayer  # noqa: E402
from .anchor_static_cache import AnchorStaticCache  # noqa: E402
from .anchors import AnchorBuilder  # noqa: E402
from .blend_config import BlendConfig  # noqa: E402
from .blend_report import BlendReport  # noqa: E402
from .blended_cache import BlendedCache  # noqa: E402
from .chunk_store import ChunkStore  # noqa: E402
from .patches.attention import anchor_attention, is_patched  # noqa: E402
from .retrieval_report import RetrievalReport  # noqa: E402
from .segments import segments_from_chat  # noqa: E402
from .sink_token import SINK  # noqa: E402
from .token_selectors import Candidates, Combined, TokenSelector  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "AnchorBuilder",
    "AnchorConfig",
    "AnchorDynamicCache",
    "AnchorLayer",
    "AnchorStaticCache",
    "BlendConfig",
    "BlendReport",
    "BlendedCache",
    "Candidates",
    "ChunkStore",
    "Combined",
    "RetrievalReport",
    "TokenSelector",
    "SINK",
    "anchor_attention",
    "is_patched",
    "segments_from_chat",
]
