"""Other libraries beside anchor_cache, each in an environment of its own: kvpress and KVBoost.

    make bench-peers                                 # sets the environments up first
    make bench-peers ARGS="--lengths 8192 --budget 1024"

kvpress compresses the cache while prefilling, to as many tokens as anchor_cache reads per step;
KVBoost joins stored chunks. They need other versions of transformers, so they run as processes of
their own, one after the other, over the same model and the same token ids. What cannot be
installed or run is reported with the reason. Writes peers.json and peers.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from benchmark_blend import check_blending, measure_blend
from benchmark_decode import stored_bytes
from benchmark_machine import commit, machine, versions
from benchmark_timing import Pace, WrongResult, alternate, require_that, shown, spread, synchronize
from blend_contestants import FULL
from blend_prefill import text_prompt
from evaluation_metrics import markdown
from small_model import load, source
from texts import manual
from transformers import DynamicCache

from anchor_cache import AnchorDynamicCache

ROOT = Path(__file__).resolve().parent.parent
PREFIX = 128  # KVBoost finds chunks at multiples of 128 tokens only
# How much less likely a peer's first token may be than ours, in nats: rounding.
_SLACK = 0.1


def run_peer(name: str, model: str, prompt: dict, script: str | None = None, **options) -> dict:
    """What a peer's script reports; ``error`` says why it does not.

    Args:
        name: of the package; its environment is ``.venv-NAME``.
        model: a folder.
        prompt: what the script is to read.
        script: in this folder; None: ``peer_NAME.py``.
        **options: of the script; a list gives several values.
    """
    folder = ROOT / f".venv-{name}"
    if not (folder / "installed").is_file():
        log = folder / "install.log"
        said = log.read_text().strip()[-1500:] if log.is_file() else "make bench-peers installs it"
        return {"error": f"not installed: {said}"}
    with tempfile.TemporaryDirectory() as scratch:
        given, output = Path(scratch, "prompt.json"), Path(scratch, "result.json")
        given.write_text(json.dumps(prompt))
        own = Path(__file__).with_name(script or f"peer_{name}.py")
        command = [folder / "bin" / "python", own]
        command += ["--model", model, "--prompt", given, "--output", output]
        for option, value in options.items():
            values = value if isinstance(value, list) else [value]
            command += [f"--{option.replace('_', '-')}", *map(str, values)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # what it writes is an error's reason
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            return {"error": f"failed: {done.stderr.strip()[-1500:]}"}
        return json.loads(output.read_text())


@torch.no_grad()
def decode_ours(model, ids: torch.Tensor, budget: int, pace: Pace) -> tuple[dict, torch.Tensor]:
    """Seconds of prefill and of decoding steps, for the stock cache and ours.

    Returns:
        Rows by contestant, and the log-probabilities of the first token.
    """
    caches = {
        "AnchorDynamicCache": AnchorDynamicCache(model.config, budget=budget),
        "DynamicCache": DynamicCache(config=model.config),
    }
    rows, tokens, first = {}, {}, None
    for name, cache in caches.items():
        synchronize(model.device)
        started = time.perf_counter()
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        tokens[name] = logits.argmax().view(1, 1)
        synchronize(model.device)
        rows[name] = dict(prefill=time.perf_counter() - started)
        own = logits.float().log_softmax(-1)
        first = own if first is None else first
        off = (own - first).abs().max().item()
        require_that(off <= _SLACK, f"{name}: the prefill is off by {off:.2g} nats")

    def step(name: str) -> None:
        logits = model(tokens[name], past_key_values=caches[name]).logits
        tokens[name] = logits[0, -1].argmax().view(1, 1)
        tokens[name].item()

    steps = {name: lambda turn, name=name: step(name) for name in caches}
    for name, seconds in alternate(steps, pace, model.device, "decoding").items():
        rows[name] |= {**spread(seconds), **stored_bytes(caches[name])}
    report = caches["AnchorDynamicCache"].report()
    most = report.max_tokens_attended
    require_that(most <= budget, f"AnchorDynamicCache: read {most} tokens, may read {budget}")
    rows["AnchorDynamicCache"]["attended"] = most if report.sparse_steps else ids.shape[1]
    rows["DynamicCache"]["attended"] = ids.shape[1]
    return rows, first


def _checked(rows: dict, first: torch.Tensor) -> dict:
    """A peer's rows; an ``error`` for those whose first token is not what the model says."""
    for row in rows.values():
        if "error" in row:
            continue
        behind = (first.max() - first[row["first_token"]]).item()
        if behind > _SLACK:
            row["error"] = f"another first token, {behind:.2g} nats less likely"
    return rows


def decoding(model, tokenizer, path: str, length: int, args) -> dict:
    """Decoding after a prompt of ordinary text: ours, the stock cache and kvpress."""
    ids = tokenizer(manual(), verbose=False)["input_ids"][:length]
    pace = Pace(args.steps, warm_up=2, seconds=1e9)
    given = torch.tensor([ids], device=model.device)
    rows, first = decode_ours(model, given, args.budget, pace)
    timing = dict(steps=args.steps, warm_up=2, device=args.device)
    peer = run_peer("kvpress", path, {"ids": ids}, budget=args.budget, **timing)
    rows |= _checked(peer.get("contestants", {}), first)
    if "error" in peer:
        rows["kvpress"] = {"error": peer["error"]}
    return dict(tokens=length, contestants=rows, versions=peer.get("versions"))


def blending(model, tokenizer, path: str, tokens: int, args) -> dict:
    """Time to the first token of a prompt of stored chunks: ours, full prefill and KVBoost."""
    prefix = PREFIX - (tokenizer.bos_token_id is not None)
    prompt = text_prompt(tokenizer, "report", tokens, None, prefix=prefix)
    check_blending(model, text_prompt(tokenizer, "report", 1024, None, prefix=prefix))
    pace = Pace(args.rounds, warm_up=0, seconds=1e9)
    ours = measure_blend(
        model, prompt, pace, ratios=(0.15,), stores=("memory",), prefix_caching=False
    )["contestants"]
    rows = {FULL: ours[FULL], "BlendedCache (15%)": ours["blend 0.15, memory"]}
    segments = list(map(list, prompt.segments))
    given = dict(segments=segments, ids=prompt.ids)
    peer = run_peer("kvboost", path, given, rounds=args.rounds, device=args.device)
    rows |= peer.get("contestants", {})
    if "error" in peer:
        rows["KVBoost"] = {"error": peer["error"]}
    return dict(tokens=len(prompt.ids), contestants=rows, versions=peer.get("versions"))


def report(about: dict) -> str:
    """Markdown."""
    where = about["machine"]
    lines = ["# Peers of anchor_cache", ""]
    lines += [f"{where['processor']}, {where['threads']} threads, commit {about['commit']}", ""]
    headers = {
        "decoding": ["tokens", "contestant", "prefill", "tokens / s", "s / token (quartiles)"],
        "blending": ["tokens", "contestant", "first token (quartiles)", "reused"],
    }
    headers["decoding"] += ["reads", "K/V and index"]
    for case, header in headers.items():
        rows = []
        for result in about[case]:
            for name, row in result["contestants"].items():
                cells = [f"{result['tokens']:,}", name]
                if "error" in row:
                    cells.append(" ".join(row["error"].split())[-400:].replace("|", "/"))
                elif case == "decoding":
                    cells += [f"{row['prefill']:.2f} s", f"{1 / row['median']:.2f}"]
                    size = row["kv_bytes"] + row.get("index_bytes", 0)
                    cells += [shown(row, "s"), f"{row['attended']:,}", f"{size / 2**20:,.0f} MiB"]
                else:
                    share = row.get("reused_share")
                    cells += [shown(row, "s"), "-" if share is None else f"{share:.0%}"]
                rows.append(cells + ["-"] * (len(header) - len(cells)))
        used = [f"{k} {v}" for r in about[case][:1] for k, v in (r["versions"] or {}).items()]
        lines += [f"## {case}", "", markdown(header, rows), "", "peer: " + ", ".join(used), ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or path; default: the small model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--prompts", type=int, nargs="*", default=[4096], help="tokens to blend")
    parser.add_argument("--budget", type=int, default=2048, help="tokens read, or kept, per layer")
    parser.add_argument("--steps", type=int, default=20, help="decoding steps per contestant")
    parser.add_argument("--rounds", type=int, default=5, help="prompts per contestant")
    parser.add_argument("--output", type=Path, default=Path("benchmark_output"), help="folder")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    path = source(args.model)
    model, tokenizer = load(path)
    model.to(args.device)
    about = dict(machine=machine(args.device), versions=versions(), commit=commit())
    now = datetime.datetime.now(datetime.timezone.utc)
    about |= dict(started=now.isoformat(timespec="seconds"), decoding=[], blending=[])
    args.output.mkdir(parents=True, exist_ok=True)
    wrong = None
    try:
        for length in args.lengths:
            about["decoding"].append(decoding(model, tokenizer, path, length, args))
        for tokens in args.prompts:
            about["blending"].append(blending(model, tokenizer, path, tokens, args))
    except WrongResult as error:
        wrong = f"a result of ours is wrong: {error}"
    (args.output / "peers.json").write_text(json.dumps(dict(about, error=wrong), indent=1))
    (args.output / "peers.md").write_text(report(about), "utf-8")
    print(report(about))
    if wrong:
        print(wrong, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
