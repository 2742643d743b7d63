"""The image installs only what is named by its content: locked packages with hashes, and a base image by digest."""

import re
import tomllib

import lock_image
import pytest
from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.repository import ROOT

LOCK = ROOT / "deploy" / "requirements.lock"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHONS = ("3.11", "3.12")
"""The oldest that flexd runs on, and the image's."""
_ENTRY = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>[^\s;]+)(?: ; (?P<marker>.+?))?(?P<hashes>(?: --hash=\S+)*)$")
_HASH = re.compile(r"^--hash=sha256:[0-9a-f]{64}$")


def environment(python: str) -> dict[str, str]:
    return {**default_environment(), "python_version": python, "python_full_version": f"{python}.9"}  # type: ignore[dict-item]


LINES = [
    _ENTRY.match(" ".join(line.split()))
    for line in LOCK.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    if line.strip() and not line.strip().startswith("#")
]
"""Name, version, marker and hashes of each line: those of all wheels and source distributions."""
assert all(LINES), "not NAME==VERSION with hashes"


def versions(python: str) -> dict[str, str]:
    """Return the version of each package that this Python installs."""
    chosen = [line for line in LINES if not line["marker"] or Marker(line["marker"]).evaluate(environment(python))]
    assert len({line["name"] for line in chosen}) == len(chosen), "a package is locked twice for one Python"
    return {line["name"]: line["version"] for line in chosen}


def unmet(wanted: list[str], python: str) -> list[str]:
    """Return the requirements that the lock does not fulfil."""
    locked = versions(python)
    missing = []
    for requirement in map(Requirement, wanted):
        needed = requirement.marker is None or requirement.marker.evaluate({**environment(python), "extra": ""})
        version = locked.get(canonicalize_name(requirement.name))
        if needed and (version is None or not requirement.specifier.contains(version, prereleases=True)):
            missing.append(f"{requirement} (locked: {version})")
    return missing


def test_every_line_has_a_version_and_hashes() -> None:
    assert len(LINES) > 20
    for line in LINES:
        hashes = line["hashes"].split()
        assert hashes, line
        assert all(_HASH.match(each) for each in hashes), line


def test_the_lock_names_no_index_address_or_path() -> None:
    text = LOCK.read_text(encoding="utf-8")
    assert lock_image.COMMAND in text.splitlines()[1]
    assert not re.search(r"index-url|find-links|trusted-host|://|file:|(^|\s)-[a-z]\b|(^|\s)/|\.whl", text)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_covers_what_the_daemon_needs(python: str) -> None:
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["daemon"],
        *project["optional-dependencies"]["stream-formats"],
        *PROJECT["build-system"]["requires"],
    ]
    assert unmet([each for each in wanted if Requirement(each).name != lock_image.LEFT_OUT], python) == []
    assert lock_image.LEFT_OUT not in versions(python)


def test_nothing_is_installed_without_a_hash() -> None:
    installs = re.findall(r"pip install (.*)", DOCKERFILE.replace("\\\n", " "))
    locked = [each for each in installs if "--require-hashes" in each]
    assert len(locked) == 1
    assert "--only-binary :all:" in locked[0]
    assert locked[0].endswith("-r requirements.lock")
    assert len(installs) == 2
    # flexd itself, with the build requirements of the lock.
    (own,) = [each for each in installs if "--no-deps" in each]
    assert {"--no-build-isolation", "--no-index"} <= set(own.split())


def test_the_base_image_is_named_by_digest() -> None:
    given = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert len(given) == 1
    assert re.fullmatch(r"python:3\.12\.\d+-slim-\w+@sha256:[0-9a-f]{64}", given[0])
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == ["${PYTHON_IMAGE}", "${PYTHON_IMAGE}"]
    assert "# syntax=" not in DOCKERFILE, "an image of its own, by tag"
    (refused,) = re.findall(r"grep -qE '(.+?)'", DOCKERFILE)
    assert re.search(refused, given[0])
    for tag in ("python:3.12-slim", "python", "python:3.12-slim@sha256:abc", "python@md5:" + "0" * 64):
        assert not re.search(refused, tag), tag
