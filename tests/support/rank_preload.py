"""Imports of the processes that tests fork, done once in the process that they are forked from.

No import becomes garbage, so all are hidden from the garbage collector, which also keeps their pages shared.
"""

import gc

import hypothesis.strategies  # noqa: F401
import pytest  # noqa: F401

# The first optimizer step imports it, which takes a second.
import torch._dynamo
import torch.distributed  # noqa: F401

import flexd.sketch.ingestor  # noqa: F401
from flexd.sketch.sketch_set import warm_up
from tests.support import (
    collection_jobs,  # noqa: F401
    exactness,  # noqa: F401
)

warm_up()
gc.freeze()
