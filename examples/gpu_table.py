"""The short table of what gpu_check.py found, beside what is aimed at."""

from __future__ import annotations

FASTER, OF_COPY = 8.0, 0.6  # than torch's attention at 8 x 131,072 keys; of the copied bandwidth
_SUBJECT = "AnchorDynamicCache"


def _operations(name: str, found: dict) -> str:
    own, dense = found["contestants"][_SUBJECT], found["contestants"].get(found["dense"])
    if dense is None:
        return f"{own['median'] * 1e6:.0f} us, {own['of_copy']:.0%} of copying"
    line = f"{own['median'] * 1e6:.0f} us, {found['speed']:.1f} x {found['dense']} "
    line += f"({dense['median'] * 1e6:.0f} us), {own['of_copy']:.0%} of copying"
    line += f" (dense {dense['of_copy']:.0%})"
    if name == "operations, 8 x 131072":
        reached = found["speed"] >= FASTER and own["of_copy"] >= OF_COPY
        line += f"; aim {FASTER:g} x and {OF_COPY:.0%}: {'reached' if reached else 'missed'}"
    return line


def _contestants(found: dict, unit: float, name: str) -> str:
    medians = (f"{who} {row['median'] * unit:.2f}" for who, row in found["contestants"].items())
    return ", ".join(medians) + f" {name}"


def _line(name: str, found: object) -> str | None:
    if name.startswith("operations"):
        return _operations(name, found)
    if name.startswith("whole step"):
        return _contestants(found, 1e3, "ms")
    if name.startswith("steps"):
        rows = found["contestants"].items()
        return ", ".join(f"{who} {row['tokens_per_second']:.1f}" for who, row in rows) + " tokens/s"
    if name.startswith("compiled"):
        return f"{found['tokens_per_second']:.1f} tokens/s, {found['graphs']} graphs"
    if name.startswith("first token"):
        return _contestants(found, 1e3, "ms")
    if name == "copy_bandwidth":
        return f"{found / 1e9:,.1f} GB/s, read and written"
    if name in ("failures", "output", "processes"):
        return None
    if isinstance(found, dict):
        return ", ".join(f"{key} {value}" for key, value in found.items())[:200]
    return str(found)


def table(report: dict) -> str:
    """Markdown: a row per measurement, then what was wrong."""
    lines = ["| stage | what | found |", "| --- | --- | --- |"]
    for stage, entry in report["stages"].items():
        lines.append(f"| {stage} | {entry['status']} | {entry['seconds']} s |")
        for name, found in entry.get("results", {}).items():
            line = _line(name, found)
            if line is not None:
                lines.append(f"| | {name} | {line} |")
        for name, why in entry.get("omitted", {}).items():
            lines.append(f"| | {name} | omitted: {why} |")
        for name, why in entry.get("errors", {}).items():
            lines.append(f"| | {name} | **{' '.join(why.split())[:300]}** |")
    done = f"all right in {report['seconds']} s"
    lines += ["", f"wrong: {', '.join(report['wrong'])}" if report["wrong"] else done]
    return "\n".join(lines)
