"""Whether the kernel has ended processes for lack of memory, by its own counts."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class MemoryKills:
    """The kernel's count of processes that it killed for lack of memory, from when this object was made."""

    def __init__(self) -> None:
        # The host's count has other containers' processes too.
        places = (*_of_control_group(), Path("/proc/vmstat"))
        self._file = next((path for path in places if _read(path) is not None), None)
        self._before = None if self._file is None else _read(self._file)

    def have_grown(self) -> bool | None:
        """Whether there was one; None where the kernel shows no count."""
        now = None if self._file is None else _read(self._file)
        return None if now is None or self._before is None else now > self._before


def _of_control_group() -> list[Path]:
    """Files that may have the count of this process's control group, of cgroup v2 and v1 (man 7 cgroups)."""
    found = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                # In a container the group may be mounted as the root.
                found += [_CGROUPS / path[1:] / "memory.events", _CGROUPS / "memory.events"]
            elif "memory" in controllers.split(","):
                root = _CGROUPS / "memory"
                found += [root / path[1:] / "memory.oom_control", root / "memory.oom_control"]
    return found


def _read(path: Path) -> int | None:
    with suppress(OSError):
        if (match := _COUNT.search(path.read_text())) is not None:
            return int(match[1])
    return None
