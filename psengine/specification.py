"""Specifications that users write, "name" or "name:option=value,option=value", and registries of the names."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from typing_extensions import Self

from psengine.errors import ConfigurationError

Made = TypeVar("Made")

_OPTION = re.compile(r"\s*([A-Za-z_][\w-]*)\s*=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Specification:
    """A name with its options.

    Attributes:
        text: as the user wrote it.
        name: what comes before the first colon.
        written: the options as they were written, by key; a list where items without ``=`` followed.
    """

    text: str
    name: str
    written: Mapping[str, str | list[str]]

    @classmethod
    def parse(cls, kind: str, text: str) -> Specification:
        """Read ``text``, a ``kind`` ("strategy"). Colons after the first belong to values, such as addresses.

        Raises:
            ConfigurationError: an option is given twice, the first item is no option, or nothing follows a colon.
        """
        name, colon, rest = text.partition(":")
        if colon and not rest.strip(" ,"):
            raise ConfigurationError(
                f"{kind} {text!r}: options follow the colon (expected {name}, or {name}:option=value, got nothing after"
                " the colon)"
            )
        written: dict[str, list[str]] = {}
        last: list[str] | None = None
        for item in filter(None, (part.strip() for part in rest.split(","))):
            match = _OPTION.fullmatch(item)
            if match is None:
                if last is None:
                    raise ConfigurationError(f"{kind} {text!r}: options are written option=value (got {item!r})")
                last.append(item)
                continue
            key, value = match.groups()
            if key in written:
                raise ConfigurationError(f"{kind} {text!r}: each option is given once (got {key!r} twice)")
            last = written[key] = [value.strip()]
        return cls(text, name, {key: items[0] if len(items) == 1 else items for key, items in written.items()})

    @property
    def options(self) -> dict[str, Any]:
        """The values by key, in the order they were written: int, float, bool, None, else text; or a list of these."""
        return {key: _value(written) for key, written in self.written.items()}

    def with_options(self, **more: str) -> str:
        """Return the text, extended by the options in ``more`` that it lacks."""
        missing = [f"{key}={value}" for key, value in more.items() if key not in self.written]
        if not missing:
            return self.text
        return (f"{self.text.rstrip(',')}," if self.written else f"{self.name}:") + ",".join(missing)


class Configured:
    """What is made from options, of which it keeps those that its constructor got."""

    _given: dict[str, Any]

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Keep the constructor's arguments by name."""
        made = super().__new__(cls)
        signature = inspect.signature(cls.__init__)
        bound = signature.bind_partial(made, *arguments, **options)
        _, *names = signature.parameters
        given = {name: value for name, value in bound.arguments.items() if name in names}
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        made._given = given
        return made

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """Its options by name, with the defaults of those that were not given."""
        return {**{name: one.default for name, one in _parameters_of(type(self)).items()}, **self._given}


def written(value: Any) -> str:
    """How users write ``value`` in "name:option=value"."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(written, value)) if isinstance(value, list | tuple) else str(value)


def specified(name: str, options: Mapping[str, Any]) -> str:
    """What users write for ``name`` with ``options``, but for those that are None."""
    items = [f"{key}={written(value)}" for key, value in options.items() if value is not None]
    return f"{name}:{','.join(items)}" if items else name


class Registry(Generic[Made]):
    """Names that users write, each with the factory that it stands for.

    Args:
        kind: the kind of object, in the singular, for messages: "strategy".
        arguments: parameters of the factories that psengine passes; a factory's other parameters are its options.
        elsewhere: by a name that is not registered, the fix: what does it instead.
    """

    def __init__(self, kind: str, arguments: Sequence[str] = (), elsewhere: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._arguments, self._elsewhere = arguments, elsewhere or {}
        self._factories: dict[str, Callable[..., Made]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._factories)

    def __getitem__(self, name: str) -> Callable[..., Made]:
        """Return what was registered as ``name``.

        Raises:
            ConfigurationError: nothing was; the message lists the names.
        """
        if name not in self._factories:
            fix = f". Fix: {self._elsewhere[name]}" if name in self._elsewhere else did_you_mean(name, self)
            raise ConfigurationError(f"unknown {self.kind} (expected one of {sorted(self)}, got {name!r}){fix}")
        return self._factories[name]

    def register(self, name: str, factory: Callable[..., Made]) -> None:
        """Let users write ``name``, and make the object by calling ``factory``.

        Raises:
            ConfigurationError: the name is taken.
        """
        if name in self._factories:
            raise ConfigurationError(
                f"{self.kind} {name!r} is registered already (expected another name for {factory!r}, got that of"
                f" {self[name]!r})"
            )
        self._factories[name] = factory

    def options_of(self, name: str) -> list[str]:
        """Keys of the options of ``name``: the parameters of its factory that psengine does not pass itself."""
        return [option for option in _parameters_of(self[name]) if option not in self._arguments]

    def _take_options(self, name: str, left: dict[str, str | list[str]]) -> dict[str, Any]:
        """Take those of the options that ``name`` has; one annotated as text stays text (a job named 7)."""
        taken = {}
        for key in self.options_of(name):
            if key in left:
                annotation = str(_parameters_of(self[name])[key].annotation)
                is_text = "str" in annotation and not re.search(r"\b(int|float)\b", annotation)
                taken[key] = _value(left.pop(key), is_text=is_text)
        return taken

    def _whose_option(self, key: str) -> str:
        """The end of an error's text, with the names that have the option ``key``; "" if none has."""
        names = ", ".join(repr(name) for name in self if key in self.options_of(name))
        return f". Fix: {key} is an option of {self.kind} {names}" if names else ""

    def read(self, text: str, parts: Mapping[str, Registry[Any]] | None = None) -> Callable[..., Made]:
        """Return the factory that ``text`` names, with the options that it gives; it takes the registry's arguments.

        Args:
            text: "name" or "name:option=value,option=value".
            parts: by option: where its value is registered. Such a part gets the options that the whole does not name.

        Raises:
            ConfigurationError: there is no such name, or no such option; the message lists what there is.
        """
        specification = Specification.parse(self.kind, text)
        name, left = specification.name, dict(specification.written)
        known = {f"{self.kind} {name!r}": self.options_of(name)}
        options = self._take_options(name, left)
        for key, registry in (parts or {}).items():
            part = options.get(key)
            if isinstance(part, str):
                if (first := part.partition(":")[0]) != part and first in registry:
                    raise ConfigurationError(
                        f"{self.kind} {text!r}: a comma separates options, a {registry.kind}'s own too (expected"
                        f" {key}={part.replace(':', ',')}, got {key}={part})"
                    )
                known[f"{registry.kind} {part!r}"] = registry.options_of(part)
                options[key] = registry[part](**registry._take_options(part, left))
        if left:
            key = next(iter(left))
            lists = ", ".join(f"{keys} of {whole}" for whole, keys in known.items() if keys)
            expected = f"some of {lists}" if lists else f"no options of {', '.join(known)}"
            raise ConfigurationError(
                f"{self.kind} {text!r}: unknown option {key!r} (expected {expected}, got {key}={left[key]})"
                f"{did_you_mean(key, itertools.chain(*known.values())) or self._whose_option(key)}"
            )
        return functools.partial(self[name], **options)


def _parameters_of(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """By name; also those of what gets the factory's ``**options``: a class's base, or what a function wraps."""
    found: dict[str, inspect.Parameter] = {}
    for one in _makers(factory):
        parameters = inspect.signature(one, follow_wrapped=False).parameters.values()
        for parameter in parameters:
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                found.setdefault(parameter.name, parameter)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def _makers(factory: Any) -> Iterator[Callable[..., Any]]:
    """The factory, and whom it passes ``**options`` on to, and so on."""
    if isinstance(factory, type):
        yield from (one for one in factory.__mro__ if "__init__" in vars(one))
        return
    yield factory
    if hasattr(factory, "__wrapped__"):
        yield from _makers(factory.__wrapped__)


def did_you_mean(name: str, known: Iterable[str], similarity: float = 0.6) -> str:
    """The end of an error's text, with the known name that is closest; "" if none is so similar, from 0 to 1."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)
    return f". Did you mean {close[0]}?" if close else ""


def _value(written: str | list[str], *, is_text: bool = False) -> Any:
    if isinstance(written, list):
        return [_value(item, is_text=is_text) for item in written]
    words = {"none": None} if is_text else {"true": True, "false": False, "none": None}
    if written.lower() in words:
        return words[written.lower()]
    for kind in () if is_text else (int, float):
        with suppress(ValueError):
            return kind(written)
    return written
