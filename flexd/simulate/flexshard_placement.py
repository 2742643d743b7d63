"""FlexShard's placement for the replay: the tiers of ``flexd.simulate.flexshard_tiers`` as listed rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.planner.model.cost import LoadSums
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import make_loads
from flexd.simulate.flexshard_tiers import flexshard_tiers
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster


def flexshard_placement(
    profile: Profile,
    keyspace: KeySpace,
    layout: RankLayout,
    cluster: Cluster,
    replica_slots: Sequence[int],
    shape: TrainingShape | None = None,
) -> Placement:
    """The tiers of all listed rows within the memory of ``replica_slots`` of every rank, one number a dim-group.

    A cap on memory is in bytes: dim-groups share it. Gradients are pushed in every pass, as fused optimizers do.

    Raises:
        PlanError: the profile is empty or of other tables.
    """
    shape = replace(shape or TrainingShape(), merged_backward=False)
    loads = make_loads(profile, keyspace, layout, shape)
    cap = float(np.dot([load.row_bytes + load.state_bytes for load in loads], replica_slots))
    found = flexshard_tiers([LoadSums(load, layout) for load in loads], layout, cluster, cap)
    keys = np.concatenate([load.keys for load in loads])
    tiers = np.concatenate(found.listed)
    above = np.flatnonzero(tiers)
    return Placement.of(keys[above], tiers[above])
