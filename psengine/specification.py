"""What users write to choose something, "name" or "name:option=value,option=value", and what is registered by name."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from psengine.errors import ConfigurationError

Made = TypeVar("Made")

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
_OPTION = re.compile(r"\s*([A-Za-z_][\w-]*)\s*=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Specification:
    """A name with its options.

    Attributes:
        text: as the user wrote it.
        name: what comes before the first colon.
        options: the values by key, in the order they were written: int, float, bool, None, else text; a list of these
            where items without ``=`` followed.
    """

    text: str
    name: str
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, kind: str, text: str) -> Specification:
        """Read ``text``, a ``kind`` ("strategy"). Colons after the first belong to values, such as addresses.

        Raises:
            ConfigurationError: an option is given twice, or the first item is no option.
        """
        name, _, rest = text.partition(":")
        written: dict[str, list[str]] = {}
        last: list[str] | None = None
        for item in filter(None, (part.strip() for part in rest.split(","))):
            match = _OPTION.fullmatch(item)
            if match is None and last is not None:
                last.append(item)
                continue
            if match is None:
                raise ConfigurationError(f"{kind} {text!r}: options are written option=value (got {item!r})")
            key, value = match.groups()
            if key in written:
                raise ConfigurationError(f"{kind} {text!r}: each option is given once (got {key!r} twice)")
            last = written[key] = [value.strip()]
        values = {key: [_value(item) for item in items] for key, items in written.items()}
        return cls(text, name, {key: items[0] if len(items) == 1 else items for key, items in values.items()})

    def with_options(self, **more: str) -> str:
        """Return the text with the options in ``more`` that it does not give."""
        missing = [f"{key}={value}" for key, value in more.items() if key not in self.options]
        if not missing:
            return self.text
        return (f"{self.text.rstrip(',')}," if self.options else f"{self.name}:") + ",".join(missing)


class Registry(Generic[Made]):
    """Names that users write, and what makes an object of each.

    Args:
        kind: what is registered here, in the singular, for messages: "strategy".
        arguments: parameters of the factories that psengine passes; a factory's other parameters are its options.
    """

    def __init__(self, kind: str, arguments: Sequence[str] = ()) -> None:
        self.kind = kind
        self._arguments = arguments
        self._factories: dict[str, Callable[..., Made]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._factories)

    def __contains__(self, name: object) -> bool:
        return name in self._factories

    def __getitem__(self, name: str) -> Callable[..., Made]:
        """Return what was registered as ``name``.

        Raises:
            ConfigurationError: nothing was; the message lists the names.
        """
        if name not in self._factories:
            raise ConfigurationError(
                f"unknown {self.kind} (expected one of {sorted(self)}, got {name!r}){did_you_mean(name, self)}"
            )
        return self._factories[name]

    def register(self, name: str, factory: Callable[..., Made]) -> None:
        """Let users write ``name``, and make the object by calling ``factory``.

        Raises:
            ConfigurationError: the name is taken, or is none.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"the name of a {self.kind} stands before the colon of name:option=value (expected letters, digits,"
                f" '.', '_' and '-', got {name!r})"
            )
        if name in self._factories:
            raise ConfigurationError(
                f"{self.kind} {name!r} is registered already (expected another name for {factory!r}, got that of"
                f" {self._factories[name]!r})"
            )
        if not callable(factory):
            raise ConfigurationError(
                f"{self.kind} {name!r} is registered by what makes one (expected its class or a function, got"
                f" {factory!r})"
            )
        self._factories[name] = factory

    def options_of(self, name: str) -> list[str]:
        """Keys of the options of ``name``: the parameters of its factory that psengine does not pass itself."""
        parameters = inspect.signature(self[name]).parameters.values()
        named = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return [option for option in named if option not in self._arguments]

    def read(self, text: str, parts: Mapping[str, Registry[Any]] | None = None) -> Callable[..., Made]:
        """Return the factory that ``text`` names, with the options that it gives; it takes the registry's arguments.

        Args:
            text: "name" or "name:option=value,option=value".
            parts: by option: where its value is registered. Such a part gets the options that the whole does not name.

        Raises:
            ConfigurationError: there is no such name, or no such option; the message lists what there is.
        """
        specification = Specification.parse(self.kind, text)
        name, left = specification.name, dict(specification.options)
        known = {f"{self.kind} {name!r}": self.options_of(name)}
        options = {key: left.pop(key) for key in self.options_of(name) if key in left}
        for key, registry in (parts or {}).items():
            part = options.get(key)
            if isinstance(part, str):
                known[f"{registry.kind} {part!r}"] = registry.options_of(part)
                options[key] = registry[part](**{k: left.pop(k) for k in registry.options_of(part) if k in left})
        if left:
            key = next(iter(left))
            lists = ", ".join(f"{keys or 'no options'} of {whole}" for whole, keys in known.items())
            raise ConfigurationError(
                f"{self.kind} {text!r}: unknown option {key!r} (expected some of {lists}, got {key}={left[key]})"
                f"{did_you_mean(key, itertools.chain(*known.values()))}"
            )
        return functools.partial(self[name], **options)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error's text: the known name that was probably meant; "" where none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f". Did you mean {close[0]}?" if close else ""


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
