"""Build script: adds the optional native extension, ``psengine._native``; the metadata lives in pyproject.toml.

The extension is built against the torch that is installed, through LibTorch's stable ABI and Python's limited API: one
binary serves torch 2.11 and later and CPython 3.10 and later. Where it cannot be built (no torch, no compiler) the
package installs without it, and psengine/kernels/ops.py runs plain torch. pip hides what a successful
build prints, so three places say so: the terminal, the name of the wheel, which pip prints, and a warning when the
package is first used (psengine/kernels/native.py reads the reason from a file beside it).

PSENGINE_CUDA=1 asks for the CUDA kernels and makes every failure an error; 0 builds without them. A torch built for
CUDA gets them without asking where there is an nvcc of its major version. A CPU-only torch lacks the functions that
they call (aoti_torch_get_current_cuda_stream), so with it csrc/kernels/fusion_cuda.cu is compiled, to see that it
does, but not linked.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.cpp"))
CUDA_SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.cu"))
TORCH_TARGET = "TORCH_TARGET_VERSION=0x020b000000000000"  # 2.11
# No -march: kernels_avx*.cpp name their own instruction sets, and are chosen when the processor is known. No fused
# multiply-add: the kernels' bits must not depend on the processor.
COMPILE_FLAGS = ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
CUDA_ARCHITECTURES = ["75", "80", "90", "100"]
IS_CUDA_ASKED = os.environ.get("PSENGINE_CUDA") == "1"
# psengine/kernels/native.py reads it.
REASON_FILE = Path("psengine", "kernels", "not_built.txt")
HOW_TO_BUILD = "install torch and a C++ compiler, then in psengine's folder: pip install --force-reinstall --no-deps ."


class CannotBuildError(Exception):
    """What the native extension lacks here."""


def torch_directory() -> Path:
    """Where torch is installed, without importing it.

    pip's build isolation hides the packages of the environment that it installs into, but runs that environment's
    interpreter: the torch beside which psengine will lie is found there.
    """
    specification = importlib.util.find_spec("torch")
    if specification is not None and specification.origin is not None:
        return Path(specification.origin).parent
    hidden = Path(sysconfig.get_path("platlib"), "torch")
    if (hidden / "include").is_dir():
        return hidden
    raise CannotBuildError(f"the build found no torch (looked on sys.path and in {hidden.parent})")


def has_cuda(torch: Path) -> bool:
    """Whether that torch was built for CUDA."""
    return any((torch / "lib").glob("libtorch_cuda.*"))


def cuda_major_of(torch: Path) -> str | None:
    """The major version of CUDA that torch was built for, without importing it; None where its version.py has none."""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)", (torch / "version.py").read_text(), re.MULTILINE)
    return found.group(1) if found else None


def cuda_major_of_nvcc(nvcc: str) -> str:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.", said)
    if found is None:
        raise CannotBuildError(f"{nvcc} --version names no release (got {said!r})")
    return found.group(1)


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc")


def cudart_directory(nvcc: str) -> str:
    """Where the CUDA runtime lies that belongs to this nvcc, which may be a wrapper script."""
    command = [nvcc, "--dryrun", "-c", CUDA_SOURCES[0]]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    tops = [line.split("TOP=", 1)[1].strip() for line in said.splitlines() if "TOP=" in line]
    for top in tops:
        for directory in (Path(top, "lib64"), Path(top, "lib"), *Path(top).glob("targets/*/lib")):
            if (directory / "libcudart_static.a").exists():
                return str(directory.resolve())
    raise CannotBuildError(f"no libcudart_static.a belongs to {nvcc} (looked below {tops})")


def known_architectures(nvcc: str) -> list[str]:
    """Those of ``CUDA_ARCHITECTURES`` that this nvcc knows; sm_100 came with CUDA 12.8."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    known = [architecture for architecture in CUDA_ARCHITECTURES if f"compute_{architecture}" in listed]
    if not known:
        raise CannotBuildError(f"{nvcc} knows none of the GPU architectures {CUDA_ARCHITECTURES} (it lists {listed})")
    return known


class BuildNative(build_ext):
    """Compiles the sources side by side; in place of an error there is a warning, unless PSENGINE_CUDA=1."""

    def run(self) -> None:
        # Beside native.py in an editable installation, else in the wheel.
        self._reason_file = REASON_FILE if self.inplace else Path(self.build_lib, REASON_FILE)
        self._reason_file.unlink(missing_ok=True)  # an earlier build's
        super().run()

    def build_extension(self, extension: Extension) -> None:
        try:
            self._build(extension)
        except CannotBuildError as reason:
            if IS_CUDA_ASKED:
                raise
            self._say_without(str(reason))
        except Exception as error:  # compilers fail in many ways, each with an exception of its own
            if IS_CUDA_ASKED:
                raise
            self._say_without(f"the compiler failed ({type(error).__name__}: {error})")

    def copy_extensions_to_source(self) -> None:
        """Skip what was not built, which setuptools itself would stumble over."""
        self.extensions = [extension for extension in self.extensions if self._was_built(extension)]
        super().copy_extensions_to_source()

    def get_outputs(self) -> list[str]:
        return [output for output in super().get_outputs() if Path(output).exists()]

    def _was_built(self, extension: Extension) -> bool:
        return Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(extension.name))).exists()

    def _say_without(self, reason: str) -> None:
        text = f"warning: psengine is built without its native extension: {reason}. Fix: {HOW_TO_BUILD}"
        print(text, file=sys.stderr)
        # pip shows the line above only with -v, or if the build fails.
        with suppress(OSError), open("/dev/tty", "w") as terminal:
            if not sys.stderr.isatty():
                terminal.write(f"\n{text}\n")
        for extension in self.extensions:  # an earlier build's
            Path(self.build_lib, self.get_ext_filename(extension.name)).unlink(missing_ok=True)
        self._reason_file.parent.mkdir(parents=True, exist_ok=True)
        self._reason_file.write_text(f"{reason}\n", encoding="utf-8")

    def _build(self, extension: Extension) -> None:
        torch = torch_directory()
        nvcc = self._nvcc(torch)
        include = torch / "include"
        output = self.get_ext_fullpath(extension.name)
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)

        def compile_source(source: str) -> list[str]:
            if source.endswith(".cu"):
                return [self._compile_cuda(nvcc, source, include)]
            return self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=[("Py_LIMITED_API", "0x030a0000"), tuple(TORCH_TARGET.split("="))],
                # Another's header is not ours to keep free of warnings.
                extra_postargs=["-Icsrc", "-isystem", str(include), *COMPILE_FLAGS],
            )

        sources = extension.sources + (CUDA_SOURCES if nvcc else [])
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            objects = [name for names in pool.map(compile_source, sources) for name in names]
        link_flags = ["-Wl,-z,now"] if sys.platform == "linux" else []
        libraries, directories = ["torch_cpu"], [str(torch / "lib")]
        if nvcc and has_cuda(torch):
            libraries += ["torch_cuda", "cudart_static", "dl", "rt", "pthread"]
            directories.append(cudart_directory(nvcc))
            link_flags.append("-Wl,--exclude-libs,ALL")
        elif nvcc:
            objects = [name for name in objects if not name.endswith(".cu.o")]
        self.compiler.link_shared_object(
            objects,
            output,
            libraries=libraries,
            library_dirs=directories,
            extra_postargs=link_flags,
            build_temp=self.build_temp,
            target_lang="c++",
        )

    def _nvcc(self, torch: Path) -> str | None:
        """The CUDA compiler, where CUDA kernels are to be compiled."""
        if os.environ.get("PSENGINE_CUDA") == "0" or not (IS_CUDA_ASKED or has_cuda(torch)):
            return None
        nvcc = find_nvcc()
        expected = cuda_major_of(torch)  # None: nothing is linked with torch's CUDA libraries
        if nvcc is None:
            reason = "no nvcc (expected it in CUDA_HOME/bin or on PATH, got neither)"
        elif expected is not None and (got := cuda_major_of_nvcc(nvcc)) != expected:
            # As torch.utils.cpp_extension: streams pass between torch's CUDA runtime and ours.
            reason = f"no nvcc of torch's major CUDA version (expected {expected}, got {got} from {nvcc})"
        else:
            return nvcc
        if IS_CUDA_ASKED:
            raise CannotBuildError(f"PSENGINE_CUDA=1 asks for CUDA kernels, but there is {reason}")
        print(f"warning: psengine is built without CUDA kernels: {reason}", file=sys.stderr)
        return None

    def _compile_cuda(self, nvcc: str, source: str, include: Path) -> str:
        target = str(Path(self.build_temp, Path(source).name + ".o"))
        command = [nvcc, "-c", source, "-o", target, "-std=c++17", "-O3", f"-D{TORCH_TARGET}", "-DUSE_CUDA"]
        command += ["-Icsrc", "-isystem", str(include), "-Xcompiler", "-fPIC,-fvisibility=hidden", "--fmad=false"]
        architectures = known_architectures(nvcc)
        for architecture in architectures:
            command += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
        # For newer GPUs, which compile it when they first meet it.
        command += ["-gencode", f"arch=compute_{architectures[-1]},code=compute_{architectures[-1]}"]
        print(" ".join(command))
        subprocess.run(command, check=True)
        return target


class NameWheel(bdist_wheel):
    """A wheel without the extension is for every platform, and its name says what it lacks: pip prints the name."""

    def get_tag(self) -> tuple[str, str, str]:
        if not Path(self.bdist_dir, REASON_FILE).exists():
            return super().get_tag()
        self.build_number = "0_without_native_extension"
        return "py3", "none", "any"


setup(
    # Of an optional extension setuptools itself would swallow a compiler's error.
    ext_modules=[
        Extension("psengine._native", SOURCES, language="c++", py_limited_api=True, optional=not IS_CUDA_ASKED)
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": NameWheel},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
