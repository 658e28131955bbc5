"""Results of an evaluation as they are made: an evaluation that is run again goes on."""

from __future__ import annotations

import json
from pathlib import Path

from benchmark_machine import commit


class Record:
    """Results in a JSONL file, found again by everything that they depend on but the library's
    code: the commit that made each is in it.

    Args:
        path: made with its folder. A last line that an interruption left unfinished is dropped.

    Raises:
        ValueError: another line is not a result; the message has its number.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.known, self.commit = path, {}, commit()
        text = path.read_text("utf-8") if path.is_file() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, "utf-8")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                result = json.loads(line)
                self.known[result["key"]] = result
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}, is not a result of an evaluation ({error}); "
                    "remove the line, or the file to evaluate anew"
                ) from error

    def add(self, key: str, result: dict) -> dict:
        """Keep a result, on the disk too."""
        self.known[key] = {"key": key, **result, "commit": self.commit}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.known[key]) + "\n")
        return self.known[key]


def results_of(path: Path, about: str | None = None) -> list[dict]:
    """The results of a record's file, if there is one; what is being written now is left out.

    Args:
        path: of the file.
        about: only results about this model, and no failures; None: all.
    """
    lines = path.read_text("utf-8").split("\n")[:-1] if path.is_file() else []
    results = [json.loads(line) for line in lines]
    if about is None:
        return results
    return [result for result in results if result["about"] == about and "error" not in result]


def described(settings: dict | None) -> str:
    """Settings as text, for keys: objects among them by their class and attributes."""
    return json.dumps(settings, sort_keys=True, default=lambda o: [type(o).__name__, vars(o)])


def grouped(results: list[dict], *names: str) -> dict:
    """Results in groups that agree in these fields, by their value or values."""
    groups: dict = {}
    for result in results:
        values = tuple(result[name] for name in names)
        groups.setdefault(values[0] if len(names) == 1 else values, []).append(result)
    return groups
