"""What a process says of an error that nobody handled.

Of psengine's own: the user's line and the sentence; PSENGINE_TRACEBACK=1 shows the whole traceback. ``psengine run``
and torchrun read every rank's error from a file in torchelastic's form; ``psengine run`` says it once for all ranks,
and that Ctrl-C came.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from psengine.environment.variables import RUN_ID, read_variable
from psengine.errors import FencedError, PSEngineError, UsageError

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

HINT = "(PSENGINE_TRACEBACK=1 shows the whole traceback)"

_installed: Hook | None = None


def install_hook() -> None:
    """Report errors that nobody handles as this module says; others as before."""
    global _installed
    previous = sys.excepthook
    if previous is _installed:
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        file = read_variable("TORCHELASTIC_ERROR_FILE")
        is_launched = bool(file and read_variable(RUN_ID))
        shortened = (PSEngineError, KeyboardInterrupt) if is_launched else PSEngineError
        is_short = isinstance(error, shortened) and not read_variable("PSENGINE_TRACEBACK")
        text = describe(error) if is_short else "".join(traceback.format_exception(error))
        if file:
            # As torch.distributed.elastic's ErrorHandler writes it.
            details: dict[str, Any] = {
                "py_callstack": text,
                "timestamp": str(int(time.time())),
                "hint": HINT if is_short else "",
                "is_refused": isinstance(error, UsageError),
            }
            message = {"message": f"{kind.__name__}: {error}", "extraInfo": details}
            new = Path(f"{file}.new")
            with contextlib.suppress(OSError):
                new.write_text(json.dumps({"message": message}))
                new.replace(file)  # at once: the agent may read it, or end this process, at any time
        if not is_short:
            previous(kind, error, trace)
        elif not is_launched:
            print(text, HINT, sep="\n", file=sys.stderr)
        if isinstance(error, FencedError):
            raise SystemExit(FencedError.EXIT_CODE)

    sys.excepthook = _installed = report


def describe(error: BaseException) -> str:
    """The last line of the user's own on the way to ``error``, and the sentence of ``error``."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    where = [f"{frame.filename}:{frame.lineno}: {frame.line}" for frame in frames[-1:]]
    return "\n".join([*where, f"{type(error).__name__}: {error}"])


def _is_users(filename: str) -> bool:
    import torch

    # Through contextlib an error leaves a context manager of ours.
    libraries = Path(str(torch.__file__)).parent, Path(__file__).parent.parent, Path(contextlib.__file__)
    return not filename.startswith("<") and not any(map(Path(filename).is_relative_to, libraries))
