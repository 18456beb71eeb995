"""The options of train_images.py."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from rank_errors import UserError

T = TypeVar("T")


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, printed by one rank."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse_options(description: str) -> argparse.Namespace:
    """Return the command line's options, checked.

    Raises:
        UserError: one is unknown, out of its range, or of no use with another.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = OptionParser(description=description, formatter_class=formatter, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--data", type=Path, metavar="DIR", help="MNIST or Fashion-MNIST, as IDX files (default: scikit-learn's digits)"
    )
    add("--pretrained", type=Path, metavar="PATH", help="start from these weights; the head may be for other classes")
    add("--checkpoint", type=Path, metavar="PATH", help="save the weights there after each epoch")
    add("--evaluate", type=Path, metavar="PATH", help="print a checkpoint's accuracy, train nothing")
    add("--compare", action="store_true", help="train native DDP beside it; fail unless the models are equal")
    add(
        "--strategy",
        metavar="NAME",
        help="how ranks agree: sync, sync-server, async ... (default: PSENGINE_STRATEGY, sync)",
    )
    add("--sync-batchnorm", action="store_true", help="normalise over the batches of all ranks")
    add("--epochs", type=positive_int, default=5, metavar="N")
    add("--max-steps", type=positive_int, metavar="N", help="end after so many optimizer steps")
    add(
        "--batch-size", type=positive_int, default=32, metavar="N", help="images per rank and micro-batch (default: 32)"
    )
    add("--accumulate", type=positive_int, default=1, metavar="N", help="micro-batches per step (default: 1)")
    add("--optimizer", choices=("sgd", "adamw"), default="sgd")
    add("--learning-rate", type=positive_float, metavar="X", help="default: 0.05 for sgd, 0.002 for adamw")
    add("--momentum", type=fraction, metavar="X", help="of sgd (default: 0.9)")
    add("--scheduler", choices=("none", "cosine"), default="none")
    add("--seed", type=seed, default=0, metavar="N", help="of the first weights and the order of images (default: 0)")
    add("--threads", type=positive_int, metavar="N", help="threads per rank (default: torch's)")
    add("--report-every", type=positive_int, default=20, metavar="N", help="steps between checks (default: 20)")
    options = parser.parse_args()

    for name in ("pretrained", "checkpoint", "compare"):
        if options.evaluate is not None and getattr(options, name):
            parser.error(f"--evaluate trains nothing: leave out --{name}")
    if options.momentum is not None and options.optimizer != "sgd":
        parser.error(f"--momentum is sgd's: leave it out with --optimizer {options.optimizer}")
    if options.momentum is None:
        options.momentum = 0.9
    if options.learning_rate is None:
        options.learning_rate = {"sgd": 0.05, "adamw": 0.002}[options.optimizer]
    return options


def positive_int(text: str) -> int:
    return checked(text, int, lambda value: value > 0, "a whole number above 0")


def positive_float(text: str) -> float:
    return checked(text, float, lambda value: 0 < value < math.inf, "a finite number above 0")


def nonnegative_float(text: str) -> float:
    return checked(text, float, lambda value: 0 <= value < math.inf, "a finite number, at least 0")


def fraction(text: str) -> float:
    return checked(text, float, lambda value: 0 <= value < 1, "a number from 0 to below 1")


def seed(text: str) -> int:
    return checked(text, int, lambda value: 0 <= value < 2**32, "a whole number from 0 to below 2**32")


def checked(text: str, kind: type[T], is_allowed: Callable[[T], bool], expected: str) -> T:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_allowed(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value
