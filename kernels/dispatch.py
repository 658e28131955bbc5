"""Choosing, for every call of an operation, the fastest implementation that can run it.

An operation is its plain PyTorch specification and, in order of preference, implementations that
take the same arguments. Each says by a predicate why it cannot take a call (None when it can), so
that the specification is used for good reasons only, and :meth:`Operation.explain` names them.

Eager calls go straight to the implementation; ``torch.compile`` sees one opaque custom operation.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

NAMESPACE = "anchor_cache"

_forced = contextvars.ContextVar("anchor_cache_implementation", default=None)


class Implementation(NamedTuple):
    """A faster way to compute an operation.

    name: "native" or "triton".
    why_not: called with the operation's arguments; None if they can be computed, else the reason.
    run: called with the same arguments; gives what the specification gives.
    """

    name: str
    why_not: Callable[..., str | None]
    run: Callable


class Operation:
    """One operation, callable like its specification.

    Args:
        reference: the specification; its annotations are the schema of the custom operation, so
            its parameters are tensors, numbers, or None.
        *implementations: the fastest first.
        fake: what gives empty tensors of the results' shapes; the specification itself, unless it
            keeps tensors between calls.
        mutates: names of the tensors that it writes to.
    """

    def __init__(
        self,
        reference: Callable,
        *implementations: Implementation,
        fake: Callable | None = None,
        mutates: tuple[str, ...] = (),
    ) -> None:
        self.reference = reference
        self.implementations = implementations
        self.__doc__ = reference.__doc__
        self.__name__ = reference.__name__
        self.custom_op = torch.library.custom_op(
            f"{NAMESPACE}::{reference.__name__}",
            self._run,
            mutates_args=mutates,
            schema=torch.library.infer_schema(reference, mutates_args=mutates),
        )
        self.custom_op.register_fake(fake or reference)

    def __call__(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return self.custom_op(*args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args, **kwargs):
        return (self.fast_for(*args, **kwargs) or self.reference)(*args, **kwargs)

    def fast_for(self, *args, **kwargs) -> Callable | None:
        """The fastest implementation that can take these arguments; None if only the specification
        can."""
        forced = _forced.get()
        for implementation in self.implementations:
            if forced is not None and implementation.name != forced:
                continue
            reason = implementation.why_not(*args, **kwargs)
            if reason is None:
                return implementation.run
            if forced is not None:
                raise NotImplementedError(f"{self.__name__}: {forced} cannot run: {reason}")
        return None

    def explain(self, *args, **kwargs) -> dict[str, str | None]:
        """Why each implementation cannot take these arguments, None for those that can."""
        return {i.name: i.why_not(*args, **kwargs) for i in self.implementations}


def is_forced(name: str) -> bool:
    """Whether :func:`use_implementation` asks for the implementations of this name."""
    return _forced.get() == name


@contextlib.contextmanager
def use_implementation(name: str) -> Iterator[None]:
    """Compute operations in one way only, for tests and measurements.

    Operations that have no implementation of this name are computed by their specification.

    Args:
        name: "reference", "native" or "triton".

    Raises:
        ValueError: no such name.
        NotImplementedError: raised by a call that this implementation cannot take, with the reason.
    """
    if name not in ("reference", "native", "triton"):
        raise ValueError(f"name={name!r} is not valid: one of reference, native, triton")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)
