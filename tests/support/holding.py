"""Programs that a test holds back by files: a step does not begin before the test has seen what it waits for.

An event of a running job (a restart, a newcomer) may come after the job's end on a machine that is fast or busy. The
program calls ``held`` before each step; the test makes a ``Hold``, starts the program with its environment, and
releases the step once all is seen that must happen before.
"""

import os
import time
from pathlib import Path

_VARIABLE = "TEST_HOLD"
DEADLINE_S = 300.0


def held(step: int, description: str = "") -> None:
    """In the program: wait while the test holds this step, or an earlier one; ``description`` is a ``Hold``'s."""
    steps, _, folder = (description or os.environ.get(_VARIABLE, "")).partition(":")
    deadline_s = time.monotonic() + DEADLINE_S
    for first in filter(None, steps.split(",")):
        while step >= int(first) and not (Path(folder) / f"released-{first}").exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the test did not release step {first}")
            time.sleep(0.01)


class Hold:
    """In the test.

    Attributes:
        description: for ``held``.
        environment: of the program, which tells it the same.
    """

    def __init__(self, folder: Path, *steps: int) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._steps = folder, list(steps)
        self.description = f"{','.join(map(str, steps))}:{folder}"
        self.environment = {_VARIABLE: self.description}

    def release(self) -> None:
        """Let the program begin the first of the steps that are held."""
        (self._folder / f"released-{self._steps.pop(0)}").touch()
