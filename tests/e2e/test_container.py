"""The image's command line without Docker: its user, read-only root and mounts, as process 1 of a namespace.

The root file system is made as the image's is: the system's programs and the installation, read-only, owned by root.
What the image and its deployments mount is all that can be written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from numba.core.caching import UserProvidedCacheLocator

from flexd.demo.processes import free_ports
from tests.support.repository import ROOT
from tests.support.until import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(220)]

READY_SECONDS = 150.0
"""The kernels are compiled where no test before this one has done so."""
SYSTEM_FILES = ("passwd", "group", "nsswitch.conf", "hosts", "ld.so.cache", "localtime")

# Run as root in mount and PID namespaces of its own. A tmpfs becomes the root: a directory of this machine that only
# root may enter (a home, a temporary directory) is then on no path that the daemon's user has to walk.
ENTER = r"""
set -eu
umask 022
mount --make-rprivate /
mount -t tmpfs -o mode=755 flexd-test "$NEW"
for system in usr bin sbin lib lib32 lib64; do
    if [ -L "/$system" ]; then cp -P "/$system" "$NEW/$system"
    elif [ -d "/$system" ]; then mkdir "$NEW/$system"; mount --rbind "/$system" "$NEW/$system"
    fi
done
mkdir "$NEW/dev" "$NEW/proc" "$NEW/tmp"
mount --rbind /dev "$NEW/dev"
mount -t proc proc "$NEW/proc"
mount --bind "$FILES/tmp" "$NEW/tmp"
# After /tmp, since this checkout may lie under it.
for path in $INSTALLED; do
    [ ! -e "$NEW$path" ] || continue
    mkdir -p "$NEW$path"
    mount --bind "$path" "$NEW$path"
    mount -o remount,ro,bind "$NEW$path"
done
mkdir -p "$NEW/etc/flexd" "$NEW/var/lib/flexd" "$NEW/opt"
for file in $SYSTEM_FILES; do [ ! -e "/etc/$file" ] || cp -L "/etc/$file" "$NEW/etc/$file"; done
ln -s "$PREFIX" "$NEW/opt/flexd"
mount --bind "$FILES/etc" "$NEW/etc/flexd"
mount -o remount,ro,bind "$NEW/etc/flexd"
mount --bind "$FILES/state" "$NEW/var/lib/flexd"
mount -o remount,ro "$NEW"
exec chroot "$NEW" env --chdir="$DIRECTORY" \
    setpriv --reuid="${OWNER%:*}" --regid="${OWNER#*:}" --clear-groups --no-new-privs --bounding-set=-all \
    --inh-caps=-all -- env --ignore-environment "${ENVIRONMENT[@]}" "$@"
"""


@dataclass(frozen=True)
class Image:
    """Settings of the last stage of the Dockerfile.

    Attributes:
        user: ``uid:gid``.
    """

    environment: dict[str, str]
    user: str
    directory: str
    command: list[str]
    stop_signal: signal.Signals

    @classmethod
    def read(cls) -> Image:
        text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
        stage = text[text.rindex("\nFROM ") :]

        def told(instruction: str) -> str:
            return re.findall(rf"^{instruction} (.*)$", stage, re.MULTILINE)[-1]

        return cls(
            environment=dict(word.split("=", 1) for word in told("ENV").split()),
            user=told("USER"),
            directory=told("WORKDIR"),
            command=json.loads(told("ENTRYPOINT")) + json.loads(told("CMD")),
            stop_signal=signal.Signals[told("STOPSIGNAL")],
        )


@dataclass(frozen=True)
class Container:
    """Attributes:
    outside: ``unshare``, which ends as the daemon does.
    files: with what is mounted: ``etc``, ``state``, ``tmp``; and the ``log``.
    """

    outside: subprocess.Popen[str]
    files: Path
    metrics_url: str

    def log(self) -> str:
        return (self.files / "log").read_text()[-3000:]

    def probe(self, path: str) -> int:
        """Return the HTTP status; 0 while nothing listens."""
        try:
            return httpx.get(f"{self.metrics_url}{path}", timeout=5, trust_env=False).status_code
        except httpx.TransportError:
            return 0

    def ingested_messages(self) -> float:
        page = httpx.get(f"{self.metrics_url}/metrics", timeout=5, trust_env=False).text
        return float(re.findall(r"^flexd_ingest_messages_total (\S+)$", page, re.MULTILINE)[0])

    def daemon(self) -> int:
        """Return the daemon's process id on this machine, once the daemon responds."""

        def up() -> bool:
            assert self.outside.poll() is None, self.log()
            return self.probe("/healthz") == 200

        until(up, READY_SECONDS, self.log)
        (child,) = children(self.outside.pid)
        return child


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("namespaces need root, unshare and setpriv")
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no namespaces")
    if not Path(sys.prefix, "bin", "flexd").exists():
        pytest.skip("flexd is not installed: make test installs it")
    image = Image.read()
    url = mount_points(tmp_path, gid=int(image.user.split(":")[1]))
    environment = {name: value.replace("$PATH", "/usr/bin:/bin") for name, value in image.environment.items()}
    # An installation that points to this checkout may be of another one.
    environment["PYTHONPATH"] = str(ROOT)
    words = " ".join(f"'{name}={value}'" for name, value in environment.items())
    (tmp_path / "enter.sh").write_text(f"ENVIRONMENT=({words})\n{ENTER}")
    installed = dict.fromkeys(
        str(path) for place in (ROOT, sys.prefix, sys.base_prefix) for path in (Path(place), Path(place).resolve())
    )
    with (tmp_path / "log").open("w") as log:
        outside = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "bash", tmp_path / "enter.sh", *image.command],
            stdout=log, stderr=log, text=True,
            env={
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "NEW": str(tmp_path / "root"), "FILES": str(tmp_path),
                "INSTALLED": " ".join(installed), "SYSTEM_FILES": " ".join(SYSTEM_FILES), "PREFIX": sys.prefix,
                "DIRECTORY": image.directory, "OWNER": image.user,
            },
        )  # fmt: skip
    try:
        yield Container(outside, tmp_path, url)
    finally:
        # unshare's own --kill-child is forgotten by the kernel as the user changes.
        if outside.poll() is None:
            for inside in children(outside.pid):
                os.kill(inside, signal.SIGKILL)
        outside.kill()
        outside.wait(10)


def mount_points(directory: Path, gid: int) -> str:
    """Makes ``etc``, ``state`` and ``tmp`` as the kubelet leaves volumes with ``fsGroup``; where metrics will be."""
    control, api, metrics = free_ports(3)
    settings = yaml.safe_load((ROOT / "deploy" / "flexd.yaml").read_text())
    settings["stream"]["source"] = {"kind": "synthetic", "accesses_per_second": 20_000}
    settings["control"] |= {"listen_host": "127.0.0.1", "listen_port": control}
    settings["server"] |= {"port": api, "metrics_listen": f"127.0.0.1:{metrics}"}
    for name in ("etc/control", "state", "tmp", "root"):
        (directory / name).mkdir(parents=True)
    (directory / "etc" / "flexd.yaml").write_text(yaml.safe_dump(settings))
    secret = directory / "etc" / "control" / "secret"
    secret.write_text("a shared secret of sixteen bytes and more")
    secret.chmod(0o440)
    os.chown(secret, 0, gid)
    os.chown(directory / "state", 0, gid)
    (directory / "state").chmod(0o2775)
    copy_kernels(directory / "tmp" / "numba")
    for path in (directory / "tmp").rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    (directory / "tmp").chmod(0o1777)
    return f"http://127.0.0.1:{metrics}"


def copy_kernels(cache: Path) -> None:
    """A new pod compiles the kernels; here what this checkout has compiled is taken, where numba will look for it."""
    for file in (ROOT / "flexd").rglob("__pycache__/*.nb[ic]"):
        package = file.parent.parent
        target = cache / UserProvidedCacheLocator.get_suitable_cache_subpath(str(package / "kernels.py")) / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)


def grace_seconds() -> float:
    """The shortest time that a deployment leaves between SIGTERM and SIGKILL."""
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["flexd"]["stop_grace_period"]
    pods = re.findall(r"terminationGracePeriodSeconds: (\d+)", (ROOT / "deploy/kubernetes/standalone.yaml").read_text())
    return min(float(compose.removesuffix("s")), *map(float, pods))


def test_daemon_as_process_one(container: Container) -> None:
    image = Image.read()
    daemon = container.daemon()
    lines = Path(f"/proc/{daemon}/status").read_text().splitlines()
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    assert fields["NSpid"][-1] == "1", "process 1 of its namespace"
    assert {*fields["Uid"], *fields["Gid"], *fields["Groups"]} <= set(image.user.split(":"))
    assert {int(fields[name][0], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {0}
    assert image.directory == "/var/lib/flexd"
    assert Path(f"/proc/{daemon}/cwd").samefile(container.files / "state")

    mounts = [line.split() for line in Path(f"/proc/{daemon}/mounts").read_text().splitlines()]
    read_only = {fields[1]: "ro" in fields[3].split(",") for fields in mounts}
    assert [read_only[path] for path in ("/", "/etc/flexd", "/tmp", "/var/lib/flexd")] == [True, True, False, False]

    # Without ranks there is nobody to serve: alive, and not ready. The admin API stays on loopback in the container.
    assert [container.probe(path) for path in ("/healthz", "/readyz", "/v1/status")] == [200, 503, 404]
    until(lambda: container.ingested_messages() > 0, 30, container.log)

    state = container.files / "state"
    assert not list((state / "snapshots").glob("snapshot-*"))
    # The kernel gives process 1 no default action: without a handler the signal would be lost, and the end a kill.
    os.kill(daemon, image.stop_signal)
    assert container.outside.wait(grace_seconds()) == 0, container.log()
    assert container.probe("/healthz") == 0
    assert list((state / "snapshots").glob("snapshot-*"))
    assert {path.stat().st_uid for path in state.rglob("*")} == {int(image.user.split(":")[0])}
