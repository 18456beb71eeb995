"""Objects of C++ sources for tests, in build/: what was compiled before is used again."""

import hashlib
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build"


def digest(paths: Iterable[Path], more: str = "") -> str:
    """What files of this content, and ``more``, have in their names."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths) + more.encode()).hexdigest()[:16]


def compile_once(target: Path, sources: Sequence[Path], flags: Sequence[str], headers: Iterable[Path]) -> Path:
    """One object of all these sources, compiled together by g++; its name is ``target`` and a digest of all."""
    target = target.with_name(f"{target.name}.{digest([*sources, *headers], ' '.join(flags))}.o")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}.o")
        includes = "".join(f'#include "{source}"\n' for source in sources)
        command = ["g++", *flags, "-c", "-x", "c++", "-", "-o", str(unfinished)]
        subprocess.run(command, input=includes, text=True, check=True)
        unfinished.rename(target)
    return target
