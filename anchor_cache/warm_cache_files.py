"""A filled cache as files: a JSON that says what it is, and one safetensors file per layer.

The JSON names the safetensors files, whose own names are never used twice. It is replaced in one
step after they are complete, so that a reader finds the old cache or the new one, whole.
"""

from __future__ import annotations

import importlib
import json
import operator
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FORMAT = 1
DESCRIPTION = "anchor_cache.json"

_TENSORS = (torch.Tensor,)  # subclasses hold more than their data
_PLAIN = (type(None), bool, int, float, str)
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}


class _Encoder:
    """One layer's attributes as JSON-serialisable values, their tensors set aside."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, name: str) -> Any:
        if type(value) in _PLAIN:
            return value
        if type(value) in _TENSORS and value.layout is torch.strided:
            self.tensors[name] = value
            return {"tensor": name, "device": str(value.device)}
        if isinstance(value, (torch.dtype, torch.device)):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if type(value) in (list, tuple):
            items = [self.encode(item, f"{name}.{i}") for i, item in enumerate(value)]
            return {type(value).__name__: items}
        if type(value) is dict and all(type(key) in (int, str) for key in value):
            items = [[key, self.encode(item, f"{name}.{key}")] for key, item in value.items()]
            return {"dict": items}
        kind = type(value).__name__
        raise TypeError(
            f"{self.layer} cannot be saved: its {name} is a {kind}, and only tensors, numbers, "
            "texts and collections of these can be written without pickling"
        )


def _decode(value: Any, tensor: Callable[[str, str], torch.Tensor], device: str | None) -> Any:
    """The inverse of :meth:`_Encoder.encode`; ``tensor(name, saved device)`` reads a tensor."""
    if type(value) in _PLAIN:
        return value
    if "tensor" in value:
        return tensor(value["tensor"], value["device"])
    ((kind, content),) = value.items()
    if kind == "device":
        return _to(torch.empty(0), device or content, False).device
    if kind == "dtype":
        return _DTYPES[content]
    if kind == "dict":
        return {key: _decode(item, tensor, device) for key, item in content}
    items = [_decode(item, tensor, device) for item in content]
    return tuple(items) if kind == "tuple" else items


def write_cache(
    folder: str | os.PathLike, settings: dict, layers: Iterable[tuple[type, dict]]
) -> None:
    """Write a cache, in place of one that is there.

    Args:
        folder: made if it does not exist; other files in it are left alone.
        settings: what belongs to the cache as a whole, JSON-serialisable.
        layers: class and attributes of each layer; one is taken after the other was written.

    Raises:
        TypeError: a layer, named, has an attribute that cannot be written; nothing is then.
    """
    from . import __version__

    folder = Path(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    token, entries, written = uuid.uuid4().hex[:12], [], []
    description = {
        "format": FORMAT,
        "anchor_cache": __version__,
        "transformers": transformers.__version__,
        **settings,
        "layers": entries,
    }
    partial = folder / f"{DESCRIPTION}.{token}.partial"
    try:
        for i, (cls, attributes) in enumerate(layers):
            encoder = _Encoder(f"layer {i} ({cls.__name__})")
            fields = {name: encoder.encode(value, name) for name, value in attributes.items()}
            entry = {"module": cls.__module__, "class": cls.__qualname__, "attributes": fields}
            if encoder.tensors:
                entry["file"] = f"anchor_cache-{token}-{i:05d}.safetensors"
                written.append(folder / entry["file"])
                _write(_apart(encoder.tensors), written[-1])
            entries.append(entry)
        old = _files_of(folder)
        partial.write_text(json.dumps(description))
        os.replace(partial, folder / DESCRIPTION)
    except BaseException:
        for path in (partial, *written):
            path.unlink(missing_ok=True)
        if is_new:
            folder.rmdir()
        raise
    for path in old:
        path.unlink(missing_ok=True)


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path)
    path.chmod(mode)  # or other users of a shared folder could not read it


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors that share no memory, as they can be written."""
    seen, apart = set(), {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        apart[name] = tensor.clone() if tensor.untyped_storage().data_ptr() in seen else tensor
        seen.add(tensor.untyped_storage().data_ptr())
    return apart


def _files_of(folder: Path) -> list[Path]:
    """The safetensors files of the cache that ``folder`` holds now."""
    try:
        layers = json.loads((folder / DESCRIPTION).read_text())["layers"]
        names = [entry["file"] for entry in layers if "file" in entry]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [folder / name for name in names if _is_ours(name)]


def _is_ours(name: str) -> bool:
    return name == os.path.basename(name) and name.startswith("anchor_cache-")


def read_description(folder: str | os.PathLike) -> dict:
    """What :func:`write_cache` wrote about the cache in ``folder``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or of a newer format.
    """
    path = Path(folder) / DESCRIPTION
    try:
        description = json.loads(path.read_text())
        newer = description["format"] > FORMAT
        if not newer:
            _ = {**description["anchor_config"]}
            _ = [entry["attributes"].items() for entry in description["layers"]]
            _ = description["adds_layers"]
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no saved cache in {folder}: {path} does not exist; save one with "
            "cache.save_pretrained(folder)"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error
    if newer:
        raise ValueError(
            f"{path} has format {description['format']}, written by anchor_cache "
            f"{description.get('anchor_cache')}, and this version reads formats up to {FORMAT}; "
            "update anchor_cache, or save the cache anew with this version"
        )
    return description


def read_layers(
    folder: str | os.PathLike, description: dict, device: str | torch.device | None
) -> Iterator[tuple[type, dict]]:
    """Class and attributes of each layer, one layer's tensors at a time.

    Args:
        folder: where the cache is.
        description: from :func:`read_description`.
        device: where to put all tensors; None for where they were.

    Raises:
        ValueError: a file is damaged or missing.
        RuntimeError: the device is not here.
        ImportError: the class of a layer is not here.
    """
    device = None if device is None else str(torch.device(device))
    for i, entry in enumerate(description["layers"]):
        cls = _layer_class(entry.get("module"), entry.get("class"))
        path = Path(folder) / entry.get("file", DESCRIPTION)
        try:
            if "file" not in entry:
                fields = _decode({"dict": list(entry["attributes"].items())}, None, device)
            elif not _is_ours(entry["file"]):
                raise ValueError(f"layer {i} names a file of another kind")
            else:
                # A class that loads states copies them; attributes would stay views of the file.
                apart = not hasattr(cls, "load_state_dict")
                with safe_open(path, "pt") as file:

                    def tensor(name, saved_on, file=file, apart=apart):
                        return _to(file.get_tensor(name), device or saved_on, apart)

                    fields = _decode({"dict": list(entry["attributes"].items())}, tensor, device)
        except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(path, error) from error
        except FileNotFoundError as error:
            raise _damaged(path, "the file is missing") from error
        yield cls, fields


def _to(tensor: torch.Tensor, device: str, apart: bool) -> torch.Tensor:
    try:
        return tensor.to(device, copy=apart)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise RuntimeError(
            f"the cache cannot be put on {device}; choose where it goes with "
            "from_pretrained(folder, device='cpu')"
        ) from error


def _layer_class(module: str, name: str) -> type:
    """The class of a layer. No module is imported but those of transformers and of this library:
    a file must not choose what code runs."""
    package = str(module).partition(".")[0]
    try:
        if package in ("transformers", __package__.partition(".")[0]):
            importlib.import_module(module)
        cls = operator.attrgetter(name)(sys.modules[module])
    except (ImportError, KeyError, AttributeError) as error:
        raise ImportError(
            f"the saved cache has layers of class {module}.{name}, which is not here (transformers "
            f"is {transformers.__version__}); import the module that defines it first"
        ) from error
    if not (isinstance(cls, type) and hasattr(cls, "reorder_cache")):
        raise ImportError(f"{module}.{name} is no class of cache layers")
    return cls


def _damaged(path: Path, why: object) -> ValueError:
    return ValueError(f"{path} is damaged or incomplete ({why}); prefill and save the cache again")
