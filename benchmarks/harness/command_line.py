"""The options that all benchmarks have, and checks of arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path


def parser_of(document: str | None, *, rounds: int, quick: str) -> argparse.ArgumentParser:
    """A parser with the common options; ``document`` is the module's docstring, ``quick`` what --quick leaves."""
    parser = argparse.ArgumentParser(description=(document or "").splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=at_least(1), default=rounds, help="turns of each candidate (default: %(default)s)")
    add("--quick", action="store_true", help=f"{quick}: noisy")
    add("--json", type=Path, metavar="FILE", help="also write all figures there")
    add("--deadline", type=at_least(1), default=600, metavar="S", help="seconds that ranks may take")
    return parser


def at_least(smallest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {smallest}, got {text}")
        return value

    return parse


def some_of(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Names separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(name.strip() for name in text.split(","))
        if unknown := [name for name in chosen if name not in allowed]:
            raise argparse.ArgumentTypeError(f"unknown {unknown[0]} (expected some of {', '.join(allowed)})")
        return chosen

    return parse


def numbers(smallest: int) -> Callable[[str], tuple[int, ...]]:
    """Whole numbers separated by commas."""
    one = at_least(smallest)
    return lambda text: tuple(dict.fromkeys(one(part) for part in text.split(",")))
