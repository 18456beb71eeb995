"""What a line of the server's log looks like: for people, or for machines."""

from __future__ import annotations

import json
import logging
import time


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z WARNING psengine.parameter_server.server.daemon: text``; UTC."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.converter = time.gmtime


class JsonFormatter(TextFormatter):
    """One JSON object a line: time, level, logger, thread, message, and traceback where there is one; UTC."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; newlines are escaped."""
        entry = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class RateLimit:
    """Lets ``burst`` messages through per ``interval_s`` and counts the others; not thread-safe."""

    def __init__(self, interval_s: float = 1.0, burst: int = 1) -> None:
        self._interval_s = interval_s
        self._burst = burst
        self._next_s = float("-inf")
        self._passed = 0
        self._suppressed = 0

    def allows(self, now_s: float) -> int | None:
        """How many were suppressed since the last one that went through; None: suppress this one too."""
        if now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self._passed = 0
        if self._passed >= self._burst:
            self._suppressed += 1
            return None
        self._passed += 1
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed
