"""The bugs by name, each a monkeypatch of the product."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from simulation.scenario import draw
from simulation.world import run

Bug = Callable[..., Any]
# By name: the owner and name of an attribute, and what it is with the bug.
PLANTED: dict[str, tuple[Any, str, Any]] = {}
# By name: what else is patched meanwhile, where one place guards another.
BESIDE: dict[str, list[tuple[Any, str, Any]]] = {}
OF_FOLLOWERS: set[str] = set()  # those that may be found where servers have followers
OF_TABLES: set[str] = set()  # ... where there are tables


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, the product has this bug."""
    with ExitStack() as stack:
        for patch in (PLANTED[name], *BESIDE.get(name, ())):
            stack.enter_context(mock.patch.object(*patch))
        yield


def plant(name: str, owner: Any, attribute: str, bug: Bug | None = None, *, value: Any = None) -> Any:
    """Register: ``bug(what it was, *arguments)`` is called in the place of ``owner.attribute``, or that is ``value``.

    Without either it decorates the bug.
    """
    if value is None and bug is None:
        return lambda function: plant(name, owner, attribute, function)
    real = getattr(owner, attribute)
    if bug is not None:  # it is called as what was there is
        taken = inspect.signature(real).parameters.values()
        places = [one.name for one in taken if one.kind is one.POSITIONAL_OR_KEYWORD]
        names = {one.name: None for one in taken if one.kind is one.KEYWORD_ONLY}
        inspect.signature(bug).bind(real, *places, **names)

    def wrong(*arguments: Any, **options: Any) -> Any:
        assert bug is not None
        return bug(real, *arguments, **options)

    PLANTED[name] = owner, attribute, wrong if value is None else value
    return bug


def constant(value: Any) -> Bug:
    """What was there is not called; the result is always this."""
    return lambda real, *arguments, **options: value


def after(change: Callable[[Any], Any]) -> Bug:
    """The result is changed."""
    return lambda real, *arguments, **options: change(real(*arguments, **options))


def then(action: Callable[[Any], None]) -> Bug:
    """Something happens to the object after the method."""

    def bug(method: Any, self: Any, *arguments: Any, **options: Any) -> Any:
        result = method(self, *arguments, **options)
        action(self)
        return result

    return bug


def keeping(name: str) -> Bug:
    """What the method takes out of this dictionary of the object stays there."""

    def bug(method: Any, self: Any, *arguments: Any, **options: Any) -> Any:
        kept = dict(getattr(self, name))
        result = method(self, *arguments, **options)
        setattr(self, name, kept | getattr(self, name))
        return result

    return bug


def with_patch(*patch: Any, **options: Any) -> Bug:
    """While the function runs, something else is patched, as by ``mock.patch.object``."""

    def bug(function: Any, *arguments: Any, **keywords: Any) -> Any:
        with mock.patch.object(*patch, **options):
            return function(*arguments, **keywords)

    return bug


def seeds_until_found(name: str, limit: int) -> tuple[int, str]:
    """After how many seeds a planted bug is found, and by what; (0, "") where it is not within ``limit``."""
    owner = PLANTED[name][0]
    is_elastic = "elastic" in getattr(owner, "__module__", owner.__name__)  # else it may be in any job
    with planted(name):
        for seed in range(limit):
            scenario = draw(seed)
            is_skipped = is_elastic and scenario.rule != "elastic"
            is_skipped |= name in OF_FOLLOWERS and not scenario.has_followers
            is_skipped |= name in OF_TABLES and not scenario.tables
            violation = "" if is_skipped else run(scenario).violation
            if violation:
                return seed + 1, violation
    return 0, ""
