"""The command line of ``psengine run``, cut in three: its own options, torchrun's, the script with its arguments."""

from __future__ import annotations

import difflib
import importlib.machinery
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from psengine.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """A command line in its parts.

    Attributes:
        own: options of ``psengine run``, as typer takes them.
        torchrun: options that go to torchrun as they are.
        script: the script, module or program, and its arguments; [] where none was given.
    """

    own: list[str] = field(default_factory=list)
    torchrun: list[str] = field(default_factory=list)
    script: list[str] = field(default_factory=list)


def split_arguments(
    arguments: Sequence[str], own: Mapping[str, bool], torchrun: Mapping[str, bool], *, command: str = "psengine run"
) -> RunArguments:
    """Cut ``arguments`` at the script: the first that is no option, or whatever follows ``--``.

    Args:
        arguments: after the command's name.
        own: each option to whether it takes a value.
        torchrun: the same; own ones count where both know a name.
        command: named in errors.

    Raises:
        ConfigurationError: an option that nobody knows, or one without its value.
    """
    parts = RunArguments()
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument == "--":
            break
        if not argument.startswith("-") or argument == "-":
            remaining.insert(0, argument)
            break
        name, equals, _ = argument.partition("=")
        if name in own:
            target, takes_value = parts.own, own[name]
        elif name in torchrun:
            target, takes_value = parts.torchrun, torchrun[name]
        elif not name.startswith("--") and name[:2] in torchrun and torchrun[name[:2]]:
            target, takes_value = parts.torchrun, False  # -r3
        else:
            raise ConfigurationError(_unknown_option(name, {*own, *torchrun}, command))
        target.append(argument)
        if takes_value and not equals:
            if not remaining:
                raise ConfigurationError(f"{name} needs a value (expected {name} VALUE, got the end of the line)")
            target.append(remaining.pop(0))
    parts.script.extend(remaining)
    return parts


def given_options(parts: RunArguments, torchrun: Mapping[str, bool]) -> list[str]:
    """Names of torchrun's options in ``parts``, as they were spelt; ``torchrun`` as in ``split_arguments``."""
    names = []
    remaining = iter(parts.torchrun)
    for argument in remaining:
        name, equals, _ = argument.partition("=")
        if name not in torchrun:
            name = name[:2]  # -r3
        elif torchrun[name] and not equals:
            next(remaining)  # its value
        names.append(name)
    return names


def _unknown_option(name: str, known: set[str], command: str) -> str:
    # Their spelling with underscores is torchrun's second one.
    names = sorted(option for option in known if "_" not in option)
    close = difflib.get_close_matches(name.replace("_", "-"), names, n=1)
    hint = f" Did you mean {close[0]}?" if close else f" See {command} --help."
    return f"no such option: {name} (expected an option of {command} or of torchrun before the script).{hint}"


def check_program(script: Sequence[str], *, is_module: bool, has_python: bool) -> None:
    """Refuse a program that is not there before anything starts.

    Raises:
        ConfigurationError: no script, no such file, no such module.
    """
    if not script:
        raise ConfigurationError(
            "which script? (expected script.py or -m module after the options, got none)."
            " Example: psengine run --workers 2 train.py"
        )
    name = script[0]
    if is_module:
        top = name.partition(".")[0]
        found = top.isidentifier() and importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
        if not found:
            raise ConfigurationError(f"no such module: {name} (expected it here or among the installed packages)")
    elif has_python:
        if not Path(name).exists():
            raise ConfigurationError(f"no such file: {name} (expected a Python script, seen from {os.getcwd()})")
    elif shutil.which(name) is None:
        raise ConfigurationError(f"no such program: {name} (expected an executable, as --no-python says)")
