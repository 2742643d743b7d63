"""Row storage of one rank: the map between keys and addresses on a device."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import Homes, KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.embedding.store.store import DeviceHomes
from tools.bench.sections.dispatch import Counting

CPU = torch.device("cpu")


RULES = ["row_wise", "table_row_wise:0", "table_row_wise:1", "table_wise:0", "table_wise:3"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from([4, 8]), st.sampled_from(RULES)), min_size=1, max_size=5))
def test_addresses_and_keys_on_a_device_are_those_of_the_host(tables: list[tuple[int, int, str]]) -> None:
    specs = [TableSpec(f"t{i}", rows, dim, sharding=rule) for i, (rows, dim, rule) in enumerate(tables)]
    homes = Homes(KeySpace(specs), RankLayout(2, 2))
    on_device = DeviceHomes(homes, CPU)
    keys = np.arange(homes.keyspace.total_rows)
    np.testing.assert_array_equal(on_device.addresses(torch.from_numpy(keys)).numpy(), homes.addresses(keys))
    every = np.arange(homes.groups[-1].end_key)
    np.testing.assert_array_equal(on_device.keys(torch.from_numpy(every)).numpy(), homes.keys(every))


@pytest.mark.parametrize("tables", [1, 7])
def test_addresses_take_eight_kernels_for_any_number_of_tables_and_none_where_all_are_spread(tables: int) -> None:
    for rule, kernels in (("row_wise", 0), ("table_row_wise:1", 8)):
        homes = Homes(KeySpace([TableSpec(f"t{i}", 10, 4, sharding=rule) for i in range(tables)]), RankLayout(2, 2))
        on_device = DeviceHomes(homes, CPU)
        keys = torch.arange(10)
        with Counting() as counting:
            on_device.addresses(keys)
        assert counting.launches.total() == kernels, counting.launches
