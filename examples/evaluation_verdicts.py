"""What was asked of the two caches, beside what the records of an evaluation say."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

from blend_contestants import FULL
from evaluation_metrics import markdown
from evaluation_record import grouped
from generation_tables import PRECISE, QUARTERS, REFERENCE, SLACK, distances
from selection_tables import CONTROL

Verdict = tuple[str, bool]  # what was measured, and whether that is what was asked


class NotRun(LookupError):
    """The records lack what a verdict needs."""


def _results(path: Path, **fields) -> list[dict]:
    """The results of a record that have these values."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    found = [r for r in map(json.loads, lines) if all(r.get(n) == v for n, v in fields.items())]
    if not found:
        wanted = ", ".join(map(str, fields.values()))
        raise NotRun(f"{path.parent.name}/{path.name} has no {wanted}")
    return found


def _mean(results: list[dict], name: str) -> float:
    values = [result[name] for result in results]
    return statistics.fmean(statistics.fmean(v) if isinstance(v, list) else v for v in values)


def needles(folder: Path) -> Verdict:
    path = folder / "retrieval" / "single-report.jsonl"
    control = {r["prompt"]: r["score"] for r in _results(path, contestant=CONTROL)}
    own = [r for r in _results(path, contestant="default", budget=0.05) if int(r["kind"]) <= 4000]
    if not own:
        raise NotRun(f"{path.parent.name}/{path.name} has none of up to 4k tokens")
    ours, dense = sum(r["score"] for r in own), sum(control[r["prompt"]] for r in own)
    lost = sum(control[r["prompt"]] > r["score"] for r in own)
    return f"{ours:.0f} of {len(own)}, dense {dense:.0f}; {lost} that dense has are lost", lost == 0


def nearness(folder: Path) -> Verdict:
    path = folder / "retrieval" / "text-report.jsonl"
    own, quest = (
        _results(path, contestant=name, budget=0.1) for name in ("default", "minmax (Quest)")
    )
    kl, rival = _mean(own, "kl"), _mean(quest, "kl")
    index, its = _mean(own, "index"), _mean(quest, "index")
    said = f"{kl:.4f} against {rival:.4f} ({kl / rival:.2f}); index {index:.1%}, {its:.1%} of K"
    return said, kl <= rival / 2 and index <= its


def drift(folder: Path) -> Verdict:
    results = _results(folder / "generation" / "generation-report.jsonl")
    groups = grouped([one for one in results if "error" not in one], "contestant", "budget")
    own = groups.get(("AnchorDynamicCache", 0.1), [])
    reference = {one["prompt"]: one for one in groups.get((REFERENCE, None), [])}
    rounding = groups.get((PRECISE, None), [])
    if not (own and rounding):
        raise NotRun("generation has no budget of 10 %, or no rounding to compare with")
    off, allowed = distances(own, reference), distances(rounding, reference)
    told = ("unequal tokens", "1 - F1", f"NLL {QUARTERS[-1]}")
    said = ", ".join(f"{name} {off[name]:.3f} (rounding {allowed[name]:.3f})" for name in told)
    return said, all(off[name] <= SLACK * allowed[name] for name in told)


def answers(folder: Path) -> Verdict:
    path = folder / "blend" / "xquad-report.jsonl"
    full, own = (_mean(_results(path, contestant=name), "f1") for name in (FULL, "default"))
    return f"{own:.3f} against {full:.3f}", own >= full - 0.01


def blend_kl(record: str) -> Callable[[Path], Verdict]:
    def verdict(folder: Path) -> Verdict:
        path = folder / "blend" / f"{record}-report.jsonl"
        names = ("default", "CacheBlend as published, 0.15")
        own, rival = (_mean(_results(path, contestant=name), "kl") for name in names)
        return f"{own:.3f} against {rival:.3f} ({own / rival:.2f})", own <= rival / 2

    return verdict


def cut_facts(folder: Path) -> Verdict:
    path = folder / "blend" / "facts-report.jsonl"
    full, own = (_mean(_results(path, contestant=name), "right") for name in (FULL, "default"))
    return f"{own:.2f} against {full:.2f} ({own / full:.0%})" if full else "full has none", (
        own >= 0.95 * full
    )


ASKED: dict[str, Callable[[Path], Verdict]] = {
    "needles up to 4k tokens, 5 % read: all that dense attention has": needles,
    "KL on text, 10 % read: at most half of Quest's, with no larger index": nearness,
    "256 tokens generated, 10 % read: as near to dense as its rounding, plus 10 %": drift,
    "blend, XQuAD, 15 %: F1 within 0.01 of full prefill": answers,
    "blend, XQuAD, 15 %: KL at most half of CacheBlend's as published": blend_kl("xquad"),
    "blend, cut facts, 15 %: KL at most half of CacheBlend's as published": blend_kl("facts"),
    "blend, text, 15 %: KL at most half of CacheBlend's as published": blend_kl(
        "continuation-6x256"
    ),
    "blend, cut facts, 15 %: at least 95 % of those of full prefill": cut_facts,
}


def table(folder: Path) -> str:
    """Markdown: every claim, what the records in the folder say, and whether it holds."""
    rows = []
    for asked, verdict in ASKED.items():
        try:
            said, holds = verdict(folder)
            rows.append([asked, said, "yes" if holds else "**no**"])
        except NotRun as missing:
            rows.append([asked, f"not run: {missing}", "-"])
    return markdown(["asked", "measured", "holds"], rows)
