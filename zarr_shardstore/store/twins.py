"""Twins of methods: they do the same for another caller, and have the same documentation."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getdoc
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def twin_of(method: Callable[..., Any], how: str) -> Callable[[F], F]:
    """Make a decorator that copies the docstring of a method, with a note how its twin differs."""
    first, _, rest = (getdoc(method) or "").partition("\n")

    def decorate(twin: F) -> F:
        note = f"As `{method.__name__}`, {how}."
        twin.__doc__ = f"{first}\n\n{note}\n{rest}"
        return twin

    return decorate
