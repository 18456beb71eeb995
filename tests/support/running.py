"""What tests ask of a process that they started, whoever starts it: what it wrote, how it ended, what it waits for."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 150.0  # a busy machine starts an interpreter with torch in half a minute


class Running(ABC):
    """A process whose output is in the files ``stdout`` and ``stderr`` of ``directory``."""

    def __init__(self, what: str, directory: Path) -> None:
        self.what = what
        self._directory = directory

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return (self._directory / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has written there so far."""
        return (self._directory / "stderr").read_text(errors="replace")

    @abstractmethod
    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send it a signal."""

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Its exit code, once it has ended; if it has not in time it is left running."""
        return self._until(lambda: None if (code := self.poll()) is None else (code,), timeout_s)[0]

    def wait_until(self, condition: Callable[[], Any], timeout_s: float = DEADLINE_S) -> Any:
        """What ``condition`` returns, once it is true; the process must run until then."""

        def condition_of_one_that_runs() -> Any:
            code = self.poll()
            found = condition()
            assert found or code is None, f"{self.what} has ended with {code}\n{self.stdout}\n{self.stderr}"
            return found

        return self._until(condition_of_one_that_runs, timeout_s)

    def _until(self, condition: Callable[[], Any], timeout_s: float) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while not (found := condition()):
            output = f"{self.stdout}\n{self.stderr}"
            assert time.monotonic() < deadline_s, f"{self.what}: still not so after {timeout_s:g} s\n{output}"
            time.sleep(0.02)
        return found
