"""Of what a rank writes after Ctrl-C, the traceback of its KeyboardInterrupt is left out; all else is shown. Pure."""

from __future__ import annotations

from psengine.cli.launching.failure import CHAINED

_HEADER = "Traceback (most recent call last):"


class InterruptFilter:
    """Takes stderr line by line and holds back a traceback for as long as it may end in KeyboardInterrupt.

    One that is a cause or a consequence of another error is a part of that error's story, and shown.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._is_interrupt = False  # what is held ends in KeyboardInterrupt
        self._last = ""  # the last line that was not blank

    def take(self, line: str, shown: bytes) -> list[bytes]:
        """What is to be shown now.

        Args:
            line: as the rank wrote it.
            shown: the form in which it is shown.
        """
        last, self._last = self._last, line.strip() or self._last
        if self._is_interrupt:
            if not line.strip():
                self._held.append(shown)
                return []
            is_linked = line.strip() in CHAINED
            found = self._held if is_linked else [one for one in self._held if not one.strip()]
            self._held, self._is_interrupt = [], False
            return [*found, *self.take(line, shown)]
        if self._held:
            self._held.append(shown)
            if line.startswith("KeyboardInterrupt"):
                self._is_interrupt = True
            elif not line.startswith(" "):
                return self._release()
            return []
        if line.startswith(_HEADER) and last not in CHAINED:
            self._held = [shown]
            return []
        if line.rstrip() == "KeyboardInterrupt" and not last:
            return []  # of an interpreter that had not begun
        return [shown]

    def finish(self) -> list[bytes]:
        """What is left to show at the end."""
        return [] if self._is_interrupt else self._release()

    def _release(self) -> list[bytes]:
        held, self._held = self._held, []
        return held
