"""Compile the library when the distribution is built, editable installs included.

The C compiler of the system is taken, else ``ziglang``, which is asked for as a build requirement only
where there is none. With neither the distribution is built without the library, and the engine runs
models in torch and says so. The library has the code for every instruction set of its machine type:
nothing is chosen by the machine that builds it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "treadle_kernels_native"
LIBRARY = "libtreadle_native.so"
FLAGS = (
    *("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared"),
    *("-fvisibility=hidden", "-pthread", "-w"),
)


class LibraryBuild(BuildHookInterface[Any]):
    """The build hook: a library in the package's folder, and a wheel for this type of machine."""

    def dependencies(self) -> list[str]:
        """Ask for a compiler where there is none."""
        return [] if system_compiler() or not is_supported() else ["ziglang>=0.16,<0.17"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / PACKAGE
        if is_supported() and not self.compile(folder):
            self.app.display_warning(
                "the native kernels are not built: no C compiler (cc) or ziglang was found that can; models "
                "on a CPU will run in torch"
            )
        if (folder / LIBRARY).is_file():
            build_data["artifacts"].append(f"{PACKAGE}/{LIBRARY}")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform()}".replace("-", "_").replace(
                "py3_none_", "py3-none-"
            )

    def compile(self, folder: Path) -> bool:
        """Make the library, unless it is newer than its sources; whether it is there then.

        It appears in one move, because processes may be using the one before it.
        """
        target = folder / LIBRARY
        sources = sorted((folder / "csrc").iterdir())
        if target.is_file():
            newest = max(path.stat().st_mtime for path in (*sources, Path(__file__)))
            if target.stat().st_mtime >= newest:
                return True
        files = [str(path) for path in sources if path.suffix == ".c"]
        for compiler in compilers():
            with tempfile.TemporaryDirectory() as scratch:
                result = Path(scratch) / LIBRARY
                command = [*compiler, *FLAGS, "-o", str(result), *files, "-lm"]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode == 0:
                    shutil.copy(result, f"{target}.new")
                    os.replace(f"{target}.new", target)
                    return True
                self.app.display_warning(f"{' '.join(compiler)} failed: {done.stderr[-2000:]}")
        target.unlink(missing_ok=True)  # it is older than its sources, and must not be loaded
        return False


def is_supported() -> bool:
    """Whether the library knows this system."""
    return sys.platform in ("linux", "darwin")


def system_compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc").split()[0])


def compilers() -> list[list[str]]:
    """The compilers to try, the system's first."""
    found = []
    if system_compiler():
        system = os.environ.get("CC", "cc").split()
        # Compilers of some distributions take a newer machine for granted.
        baseline = {"x86_64": ["-march=x86-64"], "aarch64": ["-march=armv8-a"]}
        found.append([*system, *baseline.get(platform.machine(), [])])
    if importlib.util.find_spec("ziglang") is not None:
        zig = [sys.executable, "-m", "ziglang", "cc"]
        found.append([*zig, *zig_target(sys.platform, platform.machine())])
    return found


def zig_target(system: str, machine: str) -> list[str]:
    """Flags for ``zig cc``: not for the machine at hand, and for the C library of ten years of distributions."""
    machine = {"arm64": "aarch64"}.get(machine, machine)  # as macOS calls it
    target = f"{machine}-linux-gnu.2.28" if system == "linux" else f"{machine}-macos.11.0"
    # Its functions for AVX-512 need registers of 512 bits to be allowed by name.
    cpu = "baseline+evex512" if machine == "x86_64" else "baseline"
    return ["-target", target, f"-mcpu={cpu}"]
