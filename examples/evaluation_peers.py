"""Other libraries in an evaluation, each in an environment of its own: kvpress beside a selection,
KVBoost beside a blend."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator

from benchmark_peers import run_peer
from blend_tasks import BlendPrompt
from evaluation_record import Record
from tqdm import tqdm

PRESSES = ("SnapKVPress", "ExpectedAttentionPress", "KnormPress", "KeyDiffPress")
SCRIPT = "peer_kvpress_quality.py"
KVBOOST = "KVBoost, 0.15"


def _key(about: str, place: dict, contestant: str, budget: float) -> str:
    told = json.dumps([place["ids"], place["n_target"]])
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    return "|".join((about, place["name"], digest, contestant, str(budget)))


def kvpress_quality(
    places: list[dict],
    budgets: list[float],
    model_path: str,
    record: Record,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    least: int = 1,
    places_at_once: int = 8,
) -> list[dict]:
    """How far caches that kvpress has compressed are from dense ones.

    Args:
        places: ``{"name", "ids", "n_target"}`` each: ``ids`` are a context and the ``n_target``
            tokens whose distributions are compared; names are unique.
        budgets: shares of the context that the presses keep.
        model_path: a folder.
        record: only places that it lacks are run; it gets their rows.
        dtype: the model's, as text.
        device: where to run.
        least: tokens that are kept, however small the budget.
        places_at_once: places per process; what a process did is recorded when it ends.

    Returns:
        A row per budget, press and place: ``budget``, ``contestant``, ``place``, ``kl`` and
        ``best`` (per token: to the dense run's distribution, and whether it is the most likely
        one), ``nll``, ``attended``, ``kept``, ``prefill`` (seconds) and ``versions``; ``error``
        where a press cannot run. If kvpress cannot run, a row per budget with its name as
        ``contestant`` and the reason as ``error``, after those that the record has.
    """
    about = f"{model_path}, {dtype}, {device}, {least}"
    keys = {
        (place["name"], press, budget): _key(about, place, press, budget)
        for place in places
        for press in PRESSES
        for budget in budgets
    }
    missing = [
        place
        for place in places
        if any(keys[place["name"], p, b] not in record.known for p in PRESSES for b in budgets)
    ]
    error, bar = None, tqdm(total=len(missing), desc="kvpress", unit="prompt", disable=not missing)
    for start in range(0, len(missing), places_at_once):
        sent = {"places": missing[start : start + places_at_once]}
        options = dict(presses=list(PRESSES), budgets=list(budgets), dtype=dtype, device=device)
        options["least"] = least
        made = run_peer("kvpress", model_path, sent, script=SCRIPT, **options)
        error = made.get("error")
        if error is not None:
            break
        for row in made["rows"]:
            key = keys[row["place"], row["contestant"], row["budget"]]
            if key not in record.known:
                record.add(key, dict(row, versions=made["versions"]))
        bar.update(len(sent["places"]))
    bar.close()
    rows = [record.known[key] for key in keys.values() if key in record.known]
    if error is not None:
        rows += [dict(budget=b, contestant="kvpress", place=None, error=error) for b in budgets]
    return rows


def kvboost_quality(
    prompts: dict[str, BlendPrompt],
    model_path: str,
    *,
    answer_tokens: int,
    dtype: str = "auto",
    device: str = "cpu",
    at_once: int = 8,
) -> Iterator[tuple[str, dict]]:
    """What prompts say after KVBoost has joined their chunks.

    Args:
        prompts: by any name.
        model_path: a folder.
        answer_tokens: how long a decoded answer may be.
        dtype: the model's, as text.
        device: where to run.
        at_once: prompts per process.

    Yields:
        The name of a prompt, and its figures (those of blend_answers.compare, ``seconds``,
        ``recomputed``, the share asked for, ``reused``, ``versions``) or an ``error``, as soon as
        its process has ended; after a process that failed, its error for all that are left.
    """
    left, error = list(prompts), None
    bar = tqdm(total=len(left), desc=KVBOOST, unit="prompt", disable=not left)
    while left and error is None:
        own, left = left[:at_once], left[at_once:]
        sent = dict(prompts=[dataclasses.asdict(prompts[name]) for name in own])
        sent |= dict(answer_tokens=answer_tokens)
        options = dict(script="peer_kvboost_quality.py", dtype=dtype, device=device)
        made = run_peer("kvboost", model_path, sent, **options)
        error = made.get("error")
        for name, row in zip(own, made.get("rows", []), strict=error is None):
            yield name, row if "error" in row else dict(row, versions=made["versions"])
        bar.update(len(own))
    bar.close()
    if error is not None:
        yield from ((name, dict(error=error)) for name in [*own, *left])
