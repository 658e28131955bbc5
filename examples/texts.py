"""Long texts that need no download, and more of them where a data folder is given.

Used by the evaluations: every text is plain prose or code, cut into tokens where it is needed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from pydoc_data import topics


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


def long_texts(data: str | Path | None = None) -> dict[str, str]:
    """Texts of at least 150,000 characters, by name.

    Args:
        data: a folder with ``xquad.en.json`` for the articles; None: ``$ANCHOR_CACHE_DATA``, or
            do without them.
    """
    found = {"manual": manual(), "code": code(), "licences": licences()}
    data = data or os.environ.get("ANCHOR_CACHE_DATA")
    if data is not None:
        found["articles"] = articles(Path(data))
    return {name: text for name, text in found.items() if len(text) >= 150_000}
