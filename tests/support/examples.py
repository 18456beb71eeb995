"""The scripts of examples/, run as main programs in ranks that have imported torch already."""

from __future__ import annotations

import importlib
import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Ended:
    """How a script ended."""

    code: int
    output: str
    errors: str


def example(module: str) -> ModuleType:
    """A module of examples/; they import each other by name, as they do when one is run."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(module)


def run_main(rank: int, world_size: int, module: str, *options: object, **variables: str) -> Ended:
    """Run the script in this rank, with ``variables`` in its environment."""
    os.environ.update(variables)
    sys.argv = [str(EXAMPLES / f"{module}.py"), *map(str, options)]
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        code = example(module).main()
    return Ended(code, output.getvalue(), errors.getvalue())
