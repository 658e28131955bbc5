"""What was asked of the two caches, beside what the records of an evaluation say.

Where means are compared, a verdict is "yes" or "no" only if the 95 % interval over the prompts lies
on one side of what was asked. There is none where the reference cannot do the task itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from blend_contestants import FULL
from evaluation_metrics import central, markdown, resampled_means
from evaluation_record import grouped, results_of
from generation_tables import PRECISE, QUARTERS, REFERENCE, SLACK, distances
from selection_tables import CONTROL

BLENDS = "blend-verdicts"  # the part with most prompts
ONE_BIT = "default, 1 bit per channel"
AS_MANY_ROWS = "default, 0.21"
CACHEBLEND = "CacheBlend as published, 0.15"
Verdict = tuple[str, str]  # what was measured, and yes, no, or undecided


class NotRun(LookupError):
    """The records lack what a verdict needs."""


class Records:
    """The records of an evaluation, of one model.

    Args:
        folder: of the evaluation.
        half: "tune" or "report".
        about: only results about this model count.
    """

    def __init__(self, folder: Path, half: str, about: str) -> None:
        self.folder, self.half, self.about = folder, half, about

    def all(self, part: str, record: str) -> list[dict]:
        """Every result of a record.

        Raises:
            NotRun: there are none.
        """
        path = self.folder / part / f"{record}-{self.half}.jsonl"
        found = results_of(path, self.about)
        if not found:
            raise NotRun(f"no {record} of this model in {part}")
        return found

    def paired(
        self, part: str, record: str, *chosen: dict, among: Callable = lambda result: True
    ) -> list[list[dict]]:
        """For several choices of fields, the results that have them, of the same prompts.

        Args:
            part: of the evaluation.
            record: of the part.
            *chosen: values of fields.
            among: the results that are looked at at all.

        Raises:
            NotRun: a prompt lacks one of them.
        """
        every, groups = list(filter(among, self.all(part, record))), []
        for fields in chosen:
            own = [r for r in every if all(r.get(n) == v for n, v in fields.items())]
            groups.append({(r["prompt"], r["digest"]): r for r in own})
        wanted = set().union(*groups)
        if not wanted or any(set(group) != wanted for group in groups):
            raise NotRun(f"{record} in {part} is not finished for {chosen[-1]}")
        return [[group[key] for key in sorted(wanted)] for group in groups]


def _numbers(results: list[dict], name: str) -> list[float]:
    values = [result[name] for result in results]
    return [statistics.fmean(v) if isinstance(v, list) else float(v) for v in values]


def _decided(values: Sequence[Sequence[float]], margin: Callable) -> str:
    """Whether ``margin``, of the means of several figures of the same prompts, is at least 0.

    Args:
        values: per figure, one number per prompt.
        margin: called with the figures' means.
    """
    low, high = central(margin(*resampled_means(values)))
    holds = "yes" if margin(*map(statistics.fmean, values)) >= 0 else "no"
    if low < 0 <= high:
        return f"{holds}, but the interval says both"
    return f"**{holds}**"


def needles(record: str, contestant: str = "default") -> Callable[[Records], Verdict]:
    def verdict(records: Records) -> Verdict:
        chosen = dict(contestant=contestant, budget=0.05), dict(contestant=CONTROL)
        ours, dense = records.paired(
            "retrieval", record, *chosen, among=lambda result: int(result["kind"]) <= 4000
        )
        found = [(o["score"], d["score"]) for o, d in zip(ours, dense, strict=True)]
        if sum(d for _, d in found) < len(found) / 2:
            raise NotRun("dense attention itself finds less than half")
        lost = sum(d > o for o, d in found)
        own, its = (sum(one) for one in zip(*found, strict=True))
        said = f"{own:.0f} of {len(found)}, dense {its:.0f}; {lost} that dense has are lost"
        return said, "**no**" if lost else "**yes**"

    return verdict


def nearness(contestant: str, rival: str) -> Callable[[Records], Verdict]:
    def verdict(records: Records) -> Verdict:
        chosen = [dict(contestant=name, budget=0.1) for name in (contestant, rival)]
        ours, quest = records.paired("retrieval", "text", *chosen)
        said, holds = _half(_numbers(ours, "kl"), _numbers(quest, "kl"))
        index, its = (statistics.fmean(_numbers(own, "index")) for own in (ours, quest))
        return f"{said}; index {index:.1%}, {its:.1%} of K", holds if index <= its else "**no**"

    return verdict


def _half(own: list[float], rival: list[float]) -> Verdict:
    """Whether a mean is at most half of another."""
    mean, its = statistics.fmean(own), statistics.fmean(rival)
    ratio = f" ({mean / its:.2f})" if its else ""
    said = f"{mean:.4f} against {its:.4f}{ratio}, {len(own)} prompts"
    return said, _decided((own, rival), lambda mine, others: others / 2 - mine)


def drift(records: Records) -> Verdict:
    groups = grouped(records.all("generation", "generation"), "contestant", "budget")
    own, rounding = groups.get(("AnchorDynamicCache", 0.1)), groups.get((PRECISE, None))
    reference = {one["prompt"]: one for one in groups.get((REFERENCE, None), [])}
    if not own or not rounding or not len(own) == len(rounding) == len(reference):
        raise NotRun("generation has no 10 %, no rounding to compare with, or is not finished")
    told = ("unequal tokens", "1 - F1", f"NLL {QUARTERS[-1]}")
    # The same prompts in the same order, as they are resampled together.
    off, allowed = (
        distances(sorted(one, key=lambda result: result["prompt"]), reference)
        for one in (own, rounding)
    )

    def margin(*means) -> torch.Tensor:
        mine, its = torch.stack([torch.as_tensor(one) for one in means]).split(len(told))
        return (SLACK * its - mine).amin(0)

    said = ", ".join(
        f"{name} {statistics.fmean(off[name]):.3f} (rounding {statistics.fmean(allowed[name]):.3f})"
        for name in told
    )
    holds = _decided([one[name] for one in (off, allowed) for name in told], margin)
    return f"{said}, {len(own)} prompts", holds


def answers(records: Records) -> Verdict:
    chosen = dict(contestant=FULL), dict(contestant="default")
    full, own = (_numbers(one, "f1") for one in records.paired(BLENDS, "xquad", *chosen))
    if statistics.fmean(full) < 0.2:
        raise NotRun(f"full prefill's F1 is {statistics.fmean(full):.3f}: it cannot do the task")
    said = f"{statistics.fmean(own):.3f} against {statistics.fmean(full):.3f}"
    return said, _decided((own, full), lambda mine, truth: mine - truth + 0.01)


def blend_kl(record: str) -> Callable[[Records], Verdict]:
    def verdict(records: Records) -> Verdict:
        chosen = dict(contestant="default"), dict(contestant=CACHEBLEND)
        return _half(*(_numbers(one, "kl") for one in records.paired(BLENDS, record, *chosen)))

    return verdict


def cut_facts(contestant: str) -> Callable[[Records], Verdict]:
    def verdict(records: Records) -> Verdict:
        chosen = dict(contestant=FULL), dict(contestant=contestant)
        full, own = (_numbers(one, "right") for one in records.paired(BLENDS, "facts", *chosen))
        if statistics.fmean(full) < 0.5:
            raise NotRun("full prefill itself is right in less than half")
        share = statistics.fmean(own) / statistics.fmean(full)
        said = f"{sum(own):.0f} against {sum(full):.0f} of {len(own)} ({share:.0%})"
        return said, _decided((own, full), lambda mine, truth: mine - 0.95 * truth)

    return verdict


ASKED: dict[str, Callable[[Records], Verdict]] = {
    "needles up to 4k tokens, 5 % read: all that dense attention has": needles("single"),
    "the same with one sketch bit per key channel": needles("single", ONE_BIT),
    "one of several needles, up to 4k tokens, 5 % read: the same": needles("multikey"),
    "the same with one sketch bit": needles("multikey", ONE_BIT),
    "KL on text, 10 % read: at most half of Quest's (blocks of 8), with no larger index": nearness(
        "default", "minmax, blocks of 8"
    ),
    "one sketch bit against Quest's blocks of 16: the same": nearness(ONE_BIT, "minmax (Quest)"),
    "256 tokens generated, 10 % read: as near to dense as its rounding, plus 10 %": drift,
    "blend, XQuAD, 15 %: F1 within 0.01 of full prefill": answers,
    "blend, XQuAD, 15 %: KL at most half of CacheBlend's": blend_kl("xquad"),
    "blend, cut facts, 15 %: KL at most half of CacheBlend's": blend_kl("facts"),
    "blend, text, 15 %: KL at most half of CacheBlend's": blend_kl("continuation-6x256"),
    "blend, cut facts, 15 %: at least 95 % of those of full prefill": cut_facts("default"),
    "the same at 21 % (as many rows as CacheBlend computes at 15 % in 30 layers)": cut_facts(
        AS_MANY_ROWS
    ),
}


def table(folder: Path, half: str, about: str) -> str:
    """Markdown: every claim, what the records in the folder say, and whether it holds."""
    records, rows = Records(folder, half, about), []
    for asked, verdict in ASKED.items():
        try:
            rows.append([asked, *verdict(records)])
        except NotRun as missing:
            rows.append([asked, str(missing), "-"])
    return markdown(["asked", "measured", "holds"], rows)
