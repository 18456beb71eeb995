"""Slurm's compressed lists of hosts ("n[08-10],gpu"), written out as ``scontrol show hostnames`` does. Pure."""

from __future__ import annotations

import itertools
import re

from psengine.errors import EnvironmentVariableError

_BRACKET_ITEM = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand_node_list(text: str, name: str = "node list") -> list[str]:
    """Return the hosts of Slurm's compressed ``text``, in order: ``"n[08-10],gpu"`` is n08, n09, n10, gpu.

    Numbers are as wide as the first of their range; of several brackets in one name the last varies fastest, as in
    ``scontrol show hostnames``.

    Raises:
        EnvironmentVariableError: ``text`` is malformed; the message calls it ``name``.
    """
    if not re.fullmatch(r"[^\[\]]*(\[[^\[\]]*\][^\[\]]*)*", text):
        raise _malformed(name, "brackets to be closed and not nested", text)
    hosts: list[str] = []
    # Commas within brackets separate numbers, those outside separate names.
    for term in re.split(r",(?![^\[]*\])", text):
        parts = re.split(r"\[(.*?)\]", term)  # literals at even places, what brackets hold at odd ones
        if parts == [""]:
            raise _malformed(name, "host names separated by single commas", text)
        choices = [[part] if place % 2 == 0 else _numbers(part, name, text) for place, part in enumerate(parts)]
        hosts += ("".join(choice) for choice in itertools.product(*choices))
    return hosts


def _numbers(bracket: str, name: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in bracket.split(","):
        match = _BRACKET_ITEM.fullmatch(item)
        if not match:
            raise _malformed(name, "numbers or ranges such as [1-3,07] in brackets", text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _malformed(name, f"ascending ranges instead of {item}", text)
        numbers += (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    return numbers


def _malformed(name: str, expected: str, text: str) -> EnvironmentVariableError:
    return EnvironmentVariableError(
        f"{name} must follow Slurm's syntax (expected {expected}, got {text!r})."
        " Fix: leave Slurm's variables as srun set them, or set those of torchrun yourself."
    )
