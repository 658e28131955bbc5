"""Long texts that need no download, and more of them where a data folder or data sets are given.

Used by the evaluations: every text is plain prose or code, cut into tokens where it is needed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from pydoc_data import topics

_LONG, _ENOUGH = 150_000, 2_000_000  # characters


def manual(skip: int = 0) -> str:
    """Python's manual as plain prose."""
    prose = " ".join(topics.topics[name] for name in sorted(topics.topics))
    return re.sub(r"\s+", " ", prose)[skip:]


def code() -> str:
    """Source code of Python's own library."""
    folder = Path(os.__file__).parent
    names = ("argparse", "typing", "tarfile", "subprocess", "inspect", "pathlib", "zipfile")
    files = [folder / f"{name}.py" for name in names]
    return "\n".join(file.read_text("utf-8") for file in files if file.is_file())


def licences() -> str:
    """Licence texts, where the system has them (Debian and its kin)."""
    files = sorted(Path("/usr/share/common-licenses").glob("*"))
    return "\n\n".join(f.read_text("utf-8") for f in files if f.is_file() and not f.is_symlink())


def articles(folder: Path) -> str:
    """The paragraphs of XQuAD's Wikipedia articles, one article after the other."""
    data = json.loads((folder / "xquad.en.json").read_text("utf-8"))["data"]
    return "\n\n".join(p["context"] for article in data for p in article["paragraphs"])


def from_dataset(given: str) -> str:
    """Up to two million characters of a data set's rows, one after the other.

    Args:
        given: ``NAME[:CONFIG[:SPLIT[:COLUMN]]]``, a data set on the Hub or a folder that
            ``datasets`` can load; the split is "train" and the column "text" unless said.

    Raises:
        ValueError: there is no such column.
    """
    from datasets import load_dataset

    name, config, split, column = (part or None for part in (given.split(":") + [""] * 3)[:4])
    column, parts, length = column or "text", [], 0
    for row in load_dataset(name, config, split=split or "train", streaming=True):
        if column not in row:
            raise ValueError(f"--texts {given}: no column {column!r}; there are {list(row)}")
        parts.append(row[column])
        length += len(row[column])
        if length >= _ENOUGH:
            break
    return "\n".join(parts)


def starts(text: str, half: str, places: int) -> list[int]:
    """Where contexts begin, in characters, for one of two halves that never overlap: "tune" has
    10 to 30 and 50 to 70 % of a text, "report" the 20 % behind each.

    Args:
        text: a long text.
        half: "tune" or "report".
        places: how many contexts; each has :func:`room` characters.
    """
    first = {"tune": (0.1, 0.5), "report": (0.3, 0.7)}[half]
    share = 0.2 / -(-places // 2)
    return [int((first[i % 2] + share * (i // 2)) * len(text)) for i in range(places)]


def room(text: str, places: int) -> int:
    """Characters from the start of a context to the next one's, or to the other half."""
    return int(0.2 / -(-places // 2) * len(text))


def long_texts(data: str | Path | None = None, datasets: list[str] | None = None) -> dict[str, str]:
    """Texts of at least 150,000 characters, by name.

    Args:
        data: a folder with ``xquad.en.json`` for the articles; None: ``$ANCHOR_CACHE_DATA``, or
            do without them.
        datasets: take these instead, as :func:`from_dataset` does.

    Raises:
        ValueError: a data set is too short.
    """
    if datasets:
        found = {given: from_dataset(given) for given in datasets}
        for given, text in found.items():
            if len(text) < _LONG:
                raise ValueError(
                    f"--texts {given}: {len(text):,} characters, at least {_LONG:,} are needed"
                )
        return found
    found = {"manual": manual(), "code": code(), "licences": licences()}
    data = data or os.environ.get("ANCHOR_CACHE_DATA")
    if data is not None and (Path(data) / "xquad.en.json").is_file():
        found["articles"] = articles(Path(data))
    return {name: text for name, text in found.items() if len(text) >= _LONG}
