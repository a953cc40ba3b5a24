"""How often a failed attempt is made again, and when: one value for model calls, tools and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct

from perdure.errors import InvalidDefinition, InvalidInput, quoted

Failures: TypeAlias = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]
"""A set of failures: exception classes, or a function that returns True for a member."""

MOST_SECONDS = 1e9
"""The longest pause, about 30 years: due times stay within what a store can hold."""
UNBOUNDED = 2**31 - 1
"""The number of further attempts in a tool's contract where nothing bounds them but time."""


class Retries(Struct, frozen=True):
    """When a failed attempt is made again.

    Retries()                                  # for an hour: after 0.5 s, 1 s, 2 s … 60 s, 60 s …
    Retries(attempts=3, within=None)           # at most three attempts in all, however long they take
    Retries(on=ConnectionError)                # only after these; `never=` excludes some

    `attempts` counts all attempts, the first one too; None is no limit. The pause begins with `first` seconds, is
    multiplied by `factor` after each failure and is at most `longest`; up to a quarter is taken off at random. No
    attempt is planned for later than `within` seconds after the first failure (None: no limit). A pause that the other
    side asked for (`retry-after`) replaces the computed one; if it would end after `within`, no attempt follows.

    `on` says which failures are retried, in place of the usual rule: of a model call errors that are `retryable`, of a
    step every exception, of a tool `Retry` alone. `never` excludes failures from either. Both are exception classes or
    a function of the exception.
    """

    attempts: int | None = None
    first: float = 0.5
    factor: float = 2.0
    longest: float = 60.0
    within: float | None = 3600.0
    on: Failures | None = None
    never: Failures = ()

    def __post_init__(self) -> None:
        if self.attempts is not None and not (type(self.attempts) is int and 0 < self.attempts < UNBOUNDED):
            raise InvalidDefinition(
                f"Retries(attempts={quoted(self.attempts)}) is not usable: give a whole number, 1 or more, or None"
            )
        for name, least in (("first", 0.0), ("factor", 1.0), ("longest", 0.0), ("within", 0.0)):
            value = getattr(self, name)
            if value is None and name == "within":
                continue
            if type(value) not in (int, float) or not least <= value <= MOST_SECONDS:
                also = ", or None for no limit" if name == "within" else ""
                raise InvalidDefinition(
                    f"Retries({name}={quoted(value)}) is not usable: give a number, {least:g} or more{also}"
                )
        for name, failures in (("on", self.on), ("never", self.never)):
            if failures is not None and not _are_failures(failures):
                raise InvalidDefinition(
                    f"Retries({name}={quoted(failures)}) is not usable: give exception classes, or a function of the "
                    "exception"
                )

    @property
    def more(self) -> int:
        """The number of attempts after the first one."""
        return UNBOUNDED if self.attempts is None else self.attempts - 1


def read_retries(value: object, what: str, refuse: type[InvalidInput] = InvalidDefinition) -> Retries:
    """Read `retries=` of an agent, a tool or a step: a Retries, or a whole number of further attempts."""
    if isinstance(value, Retries):
        return value
    if type(value) is int and 0 <= value < UNBOUNDED - 1:
        return Retries(attempts=value + 1)
    raise refuse(f"{what}={quoted(value)} is not usable: give a whole number, 0 or more, or Retries(…)")


def _are_failures(value: object) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(each, type) and issubclass(each, BaseException) for each in value)
    return issubclass(value, BaseException) if isinstance(value, type) else callable(value)
