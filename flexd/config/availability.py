"""Configuration of high availability: several daemons for one job, of which one leads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from flexd.config.base import Seconds, Section


class NoLease(Section):
    """This daemon is the only one of its job."""

    kind: Literal["none"] = "none"
    """Selects it."""


class FileLease(Section):
    """A lease file in a directory that all daemons share. The volume must give atomic ``link``: local file systems and
    NFS do."""

    kind: Literal["file"]
    """Selects it."""
    path: Path | None = None
    """The directory; default: ``lease`` in the state directory, which all daemons must share then."""


class KubernetesLease(Section):
    """A ``coordination.k8s.io/v1`` Lease, as the pod's service account: it needs get, create and update on leases."""

    kind: Literal["kubernetes"]
    """Selects it."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
    """Name of the Lease object, which is created if missing."""
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")] | None = None
    """Namespace of the Lease object; default: the pod's namespace."""


LeaseConfig = Annotated[NoLease | FileLease | KubernetesLease, Field(discriminator="kind")]


class HighAvailabilityConfig(Section):
    """Stand-by daemons. All run on the same file; the holder of the lease leads, the others wait."""

    lease: LeaseConfig = NoLease()
    """Where the lease is kept."""
    identity: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Name of this daemon in the lease, for people; default: the host's name."""
    duration_seconds: Annotated[Seconds, Field(ge=1, le=3600)] = 15.0
    """Validity of a renewal: a leader without a newer one stops leading, and a stand-by acquires the lease after it."""
    renew_seconds: Seconds = 3.0
    """Time between two renewals of the leader and two checks of a stand-by; at most a third of ``duration_seconds``."""

    @property
    def enabled(self) -> bool:
        return not isinstance(self.lease, NoLease)

    @field_validator("renew_seconds")
    @classmethod
    def _several_tries(cls, value: float, info: ValidationInfo) -> float:
        duration = info.data.get("duration_seconds")
        if duration is not None and value * 3 > duration:
            raise ValueError(f"at most a third of duration_seconds ({duration:g}): a renewal may fail once or twice")
        return value
