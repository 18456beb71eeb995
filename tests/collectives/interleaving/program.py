"""Compiles the explorer with the engine's own sources, and runs it.

The compiler calls a function for each access to memory (-fsanitize=thread), and those functions are the explorer's: the
sources of csrc/shared_memory are compiled as they are, but for the sizes in sizes.h.
"""

import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from collectives.interleaving.planted_bugs import Bug
from support import compiled_once
from support.compiled_once import compile_once, digest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENGINE = ROOT / "csrc" / "shared_memory"
# mapping.cpp asks the system for memory, and stand_ins.cpp has memory of its own.
ENGINE_SOURCES = ["group.cpp", "rounds.cpp", "agreement.cpp", "waiting.cpp", "segments.cpp"]
EXPLORER_SOURCES = ["memory.cpp", "explorer.cpp", "stand_ins.cpp", "scenarios.cpp", "main.cpp"]
WRAPPED = ["memcpy", "getpid", "sched_getaffinity", "sched_yield", "syscall", "poll"]
WRAPPED += ["pthread_mutex_lock", "pthread_mutex_unlock", "_ZNSt6chrono3_V212steady_clock3nowEv"]
BUILD = compiled_once.BUILD / "interleaving"
FLAGS = [
    "-std=c++17",
    "-g1",
    "-fno-pie",
    "-Wall",
    "-Wextra",
    f"-I{HERE / 'stand_ins'}",
    f"-I{ROOT / 'csrc'}",
    f"-I{HERE}",
]
# The explorer is why fences are not supported elsewhere: here each is a call that it sees.
EXPLORER_FLAGS = ["-O2", "-Wno-mismatched-new-delete"]
ENGINE_FLAGS = ["-O1", "-fsanitize=thread", "-Wno-tsan"]


def reason_against() -> str | None:
    """Why the explorer cannot be compiled here, or None."""
    if shutil.which("g++") is None or shutil.which("addr2line") is None:
        return "needs g++ and addr2line"
    said = subprocess.run(["g++", "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True).stdout
    return "needs GCC: other compilers call other functions" if "__clang__" in said else None


def _planted(bug: Bug) -> Path:
    """The bug's file, with the bug in it."""
    text = (ENGINE / bug.file).read_text()
    assert text.count(bug.old) == 1, f"{bug.name}: {bug.file} has changed (expected once: {bug.old!r})"
    path = BUILD / f"planted.{digest([], bug.name)}.cpp"
    path.write_text(text.replace(bug.old, bug.new))
    return path


def build(bug: Bug | None = None) -> Path:
    """The explorer's program, with ``bug`` in the engine."""
    BUILD.mkdir(parents=True, exist_ok=True)
    engine = [_planted(bug) if bug and bug.file == name else ENGINE / name for name in ENGINE_SOURCES]
    explorer = [HERE / name for name in EXPLORER_SOURCES]
    headers = sorted([*ENGINE.glob("*.h"), *HERE.rglob("*.h")])
    with ThreadPoolExecutor(2) as pool:
        halves = [
            pool.submit(compile_once, BUILD / "explorer", explorer, [*FLAGS, *EXPLORER_FLAGS], headers),
            pool.submit(compile_once, BUILD / "engine", engine, [*FLAGS, *ENGINE_FLAGS], headers),
        ]
        objects = [half.result() for half in halves]
    program = BUILD / f"explore.{digest(objects)}"
    if not program.exists():
        unfinished = program.with_suffix(f".{os.getpid()}")
        wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
        subprocess.run(["g++", "-no-pie", *map(str, objects), *wraps, "-o", str(unfinished)], check=True)
        unfinished.rename(program)
    return program


@cache
def place_of(program: Path, address: str) -> str:
    """File and line of the engine's source at an address of the program."""
    said = subprocess.run(["addr2line", "-i", "-e", str(program), address], capture_output=True, text=True, check=True)
    for place in said.stdout.split("\n"):
        path, _, line = place.split(" ")[0].rpartition(":")
        if "csrc/shared_memory/" in path or "build/interleaving/" in path:
            return f"   {Path(path).name}:{line}"
    return ""


def explore(program: Path, *scenarios: str, states: int = 10**9, seconds: float = 60.0) -> list[Any]:
    """The outcome of each scenario, up to so many states or seconds."""
    command = [str(program), "run", *scenarios, "--states", str(states), "--seconds", str(seconds)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60 + 1.5 * seconds * len(scenarios))
    assert ran.returncode in (0, 1), f"the explorer ended with {ran.returncode}: {ran.stderr}"
    return [json.loads(line) for line in ran.stdout.splitlines()]


def story(program: Path, outcome: Any, steps: int = 60) -> str:
    """What led to a failure, with the lines of the sources."""
    told = []
    for said in outcome["trace"][-steps:]:
        what, _, address = said.partition(" @")
        told.append(what + (place_of(program, f"0x{address}") if address else ""))
    return f"{outcome['scenario']}: {outcome['failure']}\n" + "\n".join(told)
