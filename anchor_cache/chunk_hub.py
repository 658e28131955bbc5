"""Chunk stores on the Hugging Face Hub: data set repositories of chunk files, with a card."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import DatasetCard, DatasetCardData, HfApi, snapshot_download

from .chunk import FORMAT
from .model_identity import model_identity

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Self

    from .chunk_store import ChunkStore

CHUNK_FILES = "[0-9a-f]" * 64 + ".safetensors"  # not what else lies in the folder

_CARD = """# Prefilled chunks

Keys (before RoPE) and values of documents, prefilled by
`anchor_cache` for `BlendedCache`, one safetensors file per
chunk (format `{format}`).

* pushed from a store of `{model}`, layers: {layers}
* a chunk fits only the very weights that encoded it; a blend checks that

{table}

```python
from anchor_cache import BlendedCache, ChunkStore

store = ChunkStore.from_hub("{repo_id}", model, tokenizer, prefix=prefix)
cache = BlendedCache.blend(model, store, [prefix, *documents, question])
```
"""


class HubChunks:
    """What a :class:`ChunkStore` has to do with the Hub."""

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload chunks",
    ) -> str:
        """Upload the folder's chunks to a data set repository on the Hub, and a card that says
        what they are; its ``README.md`` is replaced. Files that are there already are not sent
        again. (The Hub asks for no more than 10,000 files in a folder.)

        Args:
            repo_id: the repository; made if it does not exist.
            private: whether to make it a private one.
            token: the Hub's token; None: that of ``hf auth login``.
            commit_message: first line of the commits.

        Returns:
            The repository's URL.

        Raises:
            ValueError: there are no chunks.
        """
        if not len(self):
            raise ValueError("the store is empty: add documents before push_to_hub")
        if not os.path.isdir(self.url):
            raise ValueError(
                f"push_to_hub uploads a local folder, and the store is at {self.url}: copy its "
                "files to a folder and make a ChunkStore of that"
            )
        api = HfApi(token=token)
        card = make_card(self, repo_id)
        url = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
        target = dict(repo_id=url.repo_id, repo_type="dataset", commit_message=commit_message)
        api.upload_folder(folder_path=self.url, allow_patterns=CHUNK_FILES, **target)
        # After the chunks: a card never promises what is not there.
        api.upload_file(path_or_fileobj=str(card).encode(), path_in_repo="README.md", **target)
        return str(url)

    @classmethod
    def from_hub(
        cls,
        repo_id: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        local_dir: str | os.PathLike | None = None,
        **store_options,
    ) -> Self:
        """The store that :meth:`push_to_hub` uploaded, downloaded as a whole.

        Args:
            repo_id: the data set repository.
            revision: branch, tag or commit; None: the newest.
            token: the Hub's token, if the repository is private.
            cache_dir: where the Hub's client keeps downloads.
            local_dir: a folder for the files instead, if chunks are to be added to the store.
            **store_options: further arguments of the store, such as ``prefix``.

        Raises:
            ValueError: the repository has no chunks, or says that they are of another model.
        """
        folder = snapshot_download(
            repo_id,
            repo_type="dataset",
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_dir=local_dir,
            allow_patterns=[CHUNK_FILES, "README.md"],
        )
        _require_chunks_of(model, Path(folder), repo_id)
        return cls(folder, model, tokenizer, **store_options)


def _require_chunks_of(model: PreTrainedModel, folder: Path, repo_id: str) -> None:
    if not any(folder.glob(CHUNK_FILES)):
        raise ValueError(f"{repo_id} holds no chunks: repo_id must be what push_to_hub was given")
    card = folder / "README.md"
    said = DatasetCard.load(card).data.to_dict().get("anchor_cache") if card.is_file() else None
    if said and model_identity(model) not in said["models"]:
        raise ValueError(
            f"{repo_id} holds chunks of other weights, configuration or dtype than this model's: "
            "load the model that its card names, in the same dtype"
        )


def make_card(store: ChunkStore, repo_id: str) -> DatasetCard:
    """The card of a store: what its files say that they hold."""
    chunks, tokens = Counter(), Counter()
    for key in store.keys():
        chunks[key.model, key.prefix] += 1
        tokens[key.model, key.prefix] += len(key.ids)
    rows = [
        f"| `{model}` | {_shown(store, prefix)} | {chunks[model, prefix]:,} | "
        f"{tokens[model, prefix]:,} |"
        for model, prefix in sorted(chunks)
    ]
    header = ["| model identity | after the prefix | chunks | tokens |", "|---|---|---|---|"]
    data = DatasetCardData(
        tags=["anchor_cache", "kv-cache"],
        viewer=False,  # there are no rows to show
        anchor_cache=dict(format=FORMAT, models=sorted({m for m, _ in chunks})),
    )
    text = _CARD.format(
        format=FORMAT,
        model=_name(store.model),
        layers=store.model.config.get_text_config(decoder=True).num_hidden_layers,
        table="\n".join(header + rows),
        repo_id=repo_id,
    )
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n{text}")


def _name(model: PreTrainedModel) -> str:
    """The model's name on the Hub; a path on this machine would say nothing elsewhere."""
    name = model.config.name_or_path
    return name if name and not os.path.exists(name) else type(model).__name__


def _shown(store: ChunkStore, prefix: tuple[int, ...]) -> str:
    if not prefix:
        return "none"
    if store.tokenizer is None or len(prefix) > 64:
        return f"{len(prefix):,} tokens"
    text = repr(store.tokenizer.decode(prefix)).replace("|", "\\|").replace("`", "'")
    return f"{len(prefix):,} tokens: `{text}`"
