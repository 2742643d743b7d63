"""Writes helm/flexd/README.md from values.yaml: each key with its default and the comment above it.

``--check`` only says whether it is current.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml
from generated import write_or_check

CHART = Path(__file__).parents[1] / "helm" / "flexd"
TARGET = CHART / "README.md"
COMMAND = "python tools/gen_chart_readme.py"
FREE_FORM = ("config", "sidecar.trainer", "resources")
"""Whole values of the user's, shown as one."""

HEAD = f"""# The flexd chart

<!-- Written by `{COMMAND}` from values.yaml: change its comments, not this file. -->

Two shapes of one daemon for one training job.

- **standalone**: a Deployment that ranks anywhere in the cluster connect to.
- **sidecar**: a daemon beside the trainer in the first pod of a JobSet or PyTorchJob.

```bash
kubectl create secret generic flexd-control --from-literal=secret="$(openssl rand -hex 32)"
helm install ranking helm/flexd -f my-values.yaml
helm test ranking
```

`my-values.yaml` has to name your trainers, since only they reach the control port:

```yaml
networkPolicy:
  trainers:
    - podSelector: {{matchLabels: {{app: trainer}}}}
```

Secrets are named, never contained: `control.existingSecret`, `env` with `valueFrom`, and
`extraVolumes`. Values files to start from are in `ci/`. The values, with the daemon's whole configuration, are
checked by `values.schema.json`; what no schema can say, by the daemon itself. A map is merged into the default one: set
a key to null to be rid of it. Without Helm: `deploy/kubernetes/`, written from this chart.

## Values

| key | default | meaning |
|---|---|---|
"""


def rows(text: str) -> list[tuple[str, str, str]]:
    """(key, default as JSON, meaning) of every value, in the file's order."""
    lines = text.splitlines()
    found: list[tuple[str, str, str]] = []

    def visit(node: yaml.MappingNode, path: str, inherited: str) -> None:
        for key, value in node.value:
            name = f"{path}.{key.value}" if path else key.value
            meaning = _comment_above(lines, key.start_mark.line) or inherited
            nested = isinstance(value, yaml.MappingNode) and not value.flow_style and name not in FREE_FORM
            if nested:
                visit(value, name, "")
            else:
                default = json.dumps(yaml.safe_load(yaml.serialize(value)))
                found.append((name, "see values.yaml" if name in FREE_FORM else f"`{default}`", meaning))

    visit(yaml.compose(text), "", "")
    return found


def _comment_above(lines: list[str], line: int) -> str:
    words: list[str] = []
    while line > 0 and lines[line - 1].strip().startswith("#"):
        line -= 1
        words.insert(0, lines[line].strip().lstrip("#").strip())
    return " ".join(words).replace("|", "\\|")


def render() -> str:
    """The whole page."""
    table = [
        f"| `{key}` | {default} | {meaning} |" for key, default, meaning in rows((CHART / "values.yaml").read_text())
    ]
    return HEAD + "\n".join(table) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, COMMAND, {TARGET: render()}))
