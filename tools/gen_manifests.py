"""Writes the plain Kubernetes manifests of deploy/kubernetes/ from the chart; ``--check`` only compares.

Needs helm (``make ops-tools``). deploy/kubernetes/sidecar.yaml, for training on one node, is written by hand.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from generated import write_or_check

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "deploy" / "kubernetes"
COMMAND = "make manifests"
RELEASE = "ranking"

MANIFESTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "standalone.yaml": (
        "One Deployment for a training job.",
        ("networkPolicy.trainers[0].podSelector.matchLabels.app=trainer",),
    ),
    "sidecar-jobset.yaml": (
        "A daemon in the first pod of a JobSet.",
        ("shape=sidecar", "sidecar.workload=jobset"),
    ),
    "sidecar-pytorchjob.yaml": (
        "A daemon in the master's pod of a PyTorchJob.",
        ("shape=sidecar", "sidecar.workload=pytorchjob"),
    ),
}

HEAD = """# {text}
# Written by `{command}` from helm/flexd: change the chart, or this copy for a cluster of yours.
#
#   kubectl create secret generic flexd-control --from-literal=secret="$(openssl rand -hex 32)"
#   kubectl apply -f deploy/kubernetes/{name}
"""

_HELM_LINES = re.compile(
    r"^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by|checksum/config): .*\n|^# Source: .*\n", re.MULTILINE
)
_EMPTY_ANNOTATIONS = re.compile(r"^( *)annotations:\n(?! *\1 )", re.MULTILINE)


def helm() -> str:
    """The program: that of ``make ops-tools``, or the machine's."""
    cached = ROOT / ".ops-tools" / "bin" / "helm"
    found = str(cached) if cached.exists() else shutil.which("helm")
    if found is None:
        sys.exit("helm is not here: make ops-tools")
    return found


def render(name: str, program: str) -> str:
    """One manifest. Raises CalledProcessError if the chart does not render."""
    text, settings = MANIFESTS[name]
    chosen = [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(
        [program, "template", RELEASE, ROOT / "helm" / "flexd", "--skip-tests", "--namespace", "default", *chosen],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    body = _HELM_LINES.sub("", done.stdout)
    body = _EMPTY_ANNOTATIONS.sub("", body)
    return HEAD.format(text=text, command=COMMAND, name=name) + body


if __name__ == "__main__":
    program = helm()
    sys.exit(write_or_check(__doc__, COMMAND, {TARGET / name: render(name, program) for name in MANIFESTS}))
