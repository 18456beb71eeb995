"""The CUDA kernels, compiled for the host: the CPU kernels' bits, and no access beyond memory or across alignment.

cuda_on_host/cuda_on_host.h stands in for CUDA; cuda_on_host/trial.cpp compares.
"""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import compiled_once
from support.compiled_once import compile_once

HERE = Path(__file__).parent / "cuda_on_host"
CSRC = Path(__file__).parents[2] / "csrc"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
BUILD = compiled_once.BUILD / "cuda_on_host"
INCLUDE = BUILD / "include"
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", *SANITIZERS]
FLAGS += [f"-I{CSRC}", f"-I{HERE}", f"-I{INCLUDE}"]
SOURCES = {
    "fusion": CSRC / "kernels" / "fusion_cuda.cu",
    "codecs": CSRC / "kernels" / "codecs_cuda.cu",
    "cpu": CSRC / "kernels" / "kernels_baseline.cpp",
    "trial": HERE / "trial.cpp",
}
# Name of the source, what is there once, and what becomes of it.
PLANTED_BUGS = {
    "no barrier": (
        "fusion",
        "counts[threadIdx.x / 32] = count;\n  __syncthreads();",
        "counts[threadIdx.x / 32] = count;",
    ),
    "not aligned": ("fusion", "if (source_lead != destination_lead) return {numel, 0};", ""),
    "a value too many": ("codecs", "&& i < encoding.numel) encoding.next", "&& i <= encoding.numel) encoding.next"),
    "half a warp": ("codecs", "if (first >= encoding.numel)", "if (first + threadIdx.x % 32 >= encoding.numel)"),
    "a bit": ("codecs", "(22u << 23)", "(21u << 23)"),
}


@pytest.fixture(scope="module", autouse=True)
def headers(tmp_path_factory) -> None:
    """CUDA's headers, all of them ours; skips where the program cannot be built."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    INCLUDE.mkdir(parents=True, exist_ok=True)
    for header in ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h"):
        (INCLUDE / header).write_text('#include "cuda_on_host.h"\n')
    command = ["g++", "-x", "c++", "-", *SANITIZERS, "-o", str(tmp_path_factory.mktemp("empty") / "empty")]
    said = subprocess.run(command, input="int main() {}", capture_output=True, text=True)
    if said.returncode != 0:
        pytest.skip(f"needs libasan and libubsan: {said.stderr.strip().splitlines()[-1]}")


def trial(folder: Path, sources: dict[str, Path]) -> subprocess.CompletedProcess[str]:
    """Build the program of these sources, and run it."""
    headers = sorted([*CSRC.rglob("*.h"), *CSRC.rglob("*.inl"), *HERE.glob("*.h")])

    def compiled(name: str) -> str:
        return str(compile_once(BUILD / name, [sources[name]], FLAGS, headers))

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    program = str(folder / "trial")
    subprocess.run(["g++", *SANITIZERS, *objects, "-o", program], check=True)
    return subprocess.run([program], capture_output=True, text=True, timeout=240)


def test_the_kernels_have_the_bits_of_the_cpu(tmp_path):
    done = trial(tmp_path, SOURCES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" comparisons\n")


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_planted_bugs_are_found(bug, tmp_path):
    name, old, new = PLANTED_BUGS[bug]
    text = SOURCES[name].read_text()
    assert text.count(old) == 1
    planted = tmp_path / SOURCES[name].name
    planted.write_text(text.replace(old, new))
    assert trial(tmp_path, {**SOURCES, name: planted}).returncode != 0
