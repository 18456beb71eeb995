"""The bugs by name, each a monkeypatch of the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from simulation.scenario import draw
from simulation.world import run

Patch = Callable[[ExitStack], None]
PLANTED: dict[str, Patch] = {}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, the product has this bug."""
    with ExitStack() as stack:
        PLANTED[name](stack)
        yield


def plant(name: str, owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
    """Register: ``make`` turns what ``owner.attribute`` is into what it is with the bug."""

    def patch(stack: ExitStack) -> None:
        stack.enter_context(mock.patch.object(owner, attribute, make(getattr(owner, attribute))))

    PLANTED[name] = patch


def constant(value: Any) -> Callable[[Any], Any]:
    """What was there is not called; the result is always this."""
    return lambda _: lambda *arguments, **options: value


def after(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The result is changed."""
    return lambda function: lambda *arguments, **options: change(function(*arguments, **options))


def then(action: Callable[[Any], None]) -> Callable[[Any], Any]:
    """Something happens to the object after the method."""

    def make(method: Any) -> Any:
        def one(self: Any, *arguments: Any, **options: Any) -> Any:
            result = method(self, *arguments, **options)
            action(self)
            return result

        return one

    return make


def keeping(name: str) -> Callable[[Any], Any]:
    """What the method takes out of this dictionary of the object stays there."""

    def make(method: Any) -> Any:
        def one(self: Any, *arguments: Any, **options: Any) -> Any:
            kept = dict(getattr(self, name))
            result = method(self, *arguments, **options)
            setattr(self, name, kept | getattr(self, name))
            return result

        return one

    return make


def without(owner: Any, attribute: str) -> Callable[[Any], Any]:
    """While the function runs, another does nothing."""

    def make(function: Any) -> Any:
        def one(*arguments: Any, **options: Any) -> Any:
            with mock.patch.object(owner, attribute):
                return function(*arguments, **options)

        return one

    return make


def seeds_until_found(name: str, limit: int) -> tuple[int, str]:
    """After how many seeds a planted bug is found, and by what; (0, "") where it is not within ``limit``."""
    with planted(name):
        for seed in range(limit):
            violation = run(draw(seed)).violation
            if violation:
                return seed + 1, violation
    return 0, ""
