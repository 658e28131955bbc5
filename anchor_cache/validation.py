"""What both configurations share: clear errors, keywords, JSON."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    """Raise ValueError naming the field, the value and what is allowed."""
    if not condition:
        raise ValueError(f"{field}={value!r} is not valid: {allowed}")


def is_share(value: Any) -> bool:
    """Whether it is a number in (0, 1]."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


def is_int(value: Any, minimum: int) -> bool:
    """Whether it is an int of at least ``minimum``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


class Config:
    """What the two configurations share."""

    @classmethod
    def from_kwargs(cls, config: Config | None, kwargs: dict) -> Config:
        """``config`` (None: the defaults) with the fields in ``kwargs`` replaced.

        Raises:
            TypeError: a keyword is not a field, or ``config`` is something else.
            ValueError: a value is out of range.
        """
        if config is not None and not isinstance(config, cls):
            raise TypeError(f"expected a {cls.__name__}, not a {type(config).__name__}")
        names = [field.name for field in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in names:
                close = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(names)}"
                raise TypeError(f"{cls.__name__} has no field {name!r}{hint}")
        return dataclasses.replace(cls() if config is None else config, **kwargs)

    def to_dict(self) -> dict:
        """The fields as JSON-serialisable values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> Config:
        """The inverse of :meth:`to_dict`."""
        return cls.from_kwargs(None, data)
