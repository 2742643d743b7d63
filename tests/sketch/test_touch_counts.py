"""Touches counted from a stream equal those counted from the batches themselves."""

import numpy as np

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.core.tap_counts import PassRows, TapCounts, TapPasses
from flexd.simulate.accesses import exact_profile
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_sketch import SketchSettings
from flexd.sketch.touch_counts import TableTouches
from tests.support.saved_sketches import loaded_sketches

LAYOUT = RankLayout(2, 2)
ROWS = 200
FOREVER = ForwardDecay(None, 0.0)


def correlated(steps: int, seed: int = 0, accesses: int = 40) -> list[list[np.ndarray]]:
    """Batches in which the ranks of a step look up rows near each other, so that independence is far off."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(steps):
        centre = int(random.integers(ROWS))
        made.append([(centre + random.integers(0, 30, accesses)) % ROWS for _ in range(LAYOUT.world_size)])
    return made


def exact(steps: list[list[np.ndarray]], rows: np.ndarray) -> np.ndarray:
    profile = exact_profile(steps, KeySpace([TableSpec("t", ROWS, 4)]), LAYOUT).tables[0]
    found = np.zeros((3, ROWS))
    touches = profile.touches
    found[:, profile.hot_rows] = [touches.per_rank, touches.per_node, touches.anywhere]
    return found[:, rows]


def counted(touches: TableTouches, rows: np.ndarray, decay: ForwardDecay = FOREVER) -> np.ndarray:
    found = touches.read(rows, decay, LAYOUT)
    return np.stack([found.per_rank, found.per_node, found.anywhere])


def feed(touches: TableTouches, steps, order=None, decay: ForwardDecay = FOREVER, seconds=lambda step: 0.0) -> None:
    entries = [(step, rank, rows) for step, ranks in enumerate(steps) for rank, rows in enumerate(ranks)]
    for at in range(len(entries)) if order is None else order:
        step, rank, rows = entries[at]
        touches.add(rows, rank, step, seconds(step), decay)


def table(capacity: int = 1000) -> TableTouches:
    touches = TableTouches(ROWS, capacity)
    touches.set_layout(LAYOUT)
    return touches


def test_steps_give_the_touches_of_the_batches_in_any_order_of_arrival():
    steps = correlated(60)
    order = np.argsort(np.arange(60 * 4) + np.random.default_rng(1).uniform(0, 20, 240))
    touches = table()
    feed(touches, steps, order)
    touches.flush(FOREVER)
    rows = np.arange(ROWS)
    np.testing.assert_allclose(counted(touches, rows), exact(steps, rows), rtol=1e-12)


def test_without_step_numbers_only_the_touches_of_a_rank_are_known():
    steps = correlated(30)
    touches = table()
    for ranks in steps:
        for rank, rows in enumerate(ranks):
            touches.add(rows, rank, None, 0.0, FOREVER)
    found = counted(touches, np.arange(ROWS))
    np.testing.assert_allclose(found[0], exact(steps, np.arange(ROWS))[0], rtol=1e-12)
    assert np.isnan(found[1:]).all()


def test_a_step_without_every_rank_counts_for_the_rank_alone():
    steps = correlated(40)
    touches = table()
    entries = [(s, r, rows) for s, ranks in enumerate(steps) for r, rows in enumerate(ranks) if s % 2 or r != 3]
    for step, rank, rows in entries:
        touches.add(rows, rank, step, 0.0, FOREVER)
    touches.flush(FOREVER)
    rows = np.arange(ROWS)
    np.testing.assert_allclose(counted(touches, rows)[1:], exact(steps[1::2], rows)[1:], rtol=1e-12)


def test_old_steps_decay_like_accesses():
    decay = ForwardDecay(10.0, 0.0)
    old, new = correlated(50, 1), correlated(50, 2)
    touches = table()
    feed(touches, old, decay=decay)
    decay.advance(400.0)
    for step, ranks in enumerate(new, 50):
        for rank, rows in enumerate(ranks):
            touches.add(rows, rank, step, 400.0, decay)
    touches.flush(decay)
    np.testing.assert_allclose(
        counted(touches, np.arange(ROWS), decay), exact(new, np.arange(ROWS)), rtol=1e-6, atol=1e-9
    )


def test_saved_and_loaded_touches_are_equal():
    sketches = SketchSet([TableSpec("t", ROWS, 4)], SketchSettings(half_life_seconds=None))
    sketches.profile(layout=LAYOUT)
    for step, ranks in enumerate(correlated(40)):
        for rank, rows in enumerate(ranks):
            sketches.ingest("t", rows, rank, 1.0, step=step)
    sketches._tables["t"].touches.flush(sketches._decay)
    meta, arrays = sketches.state()
    loaded = loaded_sketches([TableSpec("t", ROWS, 4)], sketches.settings, meta, arrays)
    before, after = (each.profile(layout=LAYOUT).tables[0].touches for each in (sketches, loaded))
    np.testing.assert_array_equal(before.anywhere, after.anywhere)
    assert not np.isnan(after.per_node).any()


def test_beyond_a_number_of_accesses_the_same_steps_of_all_ranks_are_sampled():
    steps = correlated(3000)
    touches = TableTouches(ROWS, 1000)
    touches._whole_accesses = 16_000
    touches.set_layout(LAYOUT)
    feed(touches, steps)
    touches.flush(FOREVER)
    batches, whole_steps = touches._totals[:2]
    assert batches == 4 * whole_steps
    assert 100 + 2900 / 64 * 0.7 < whole_steps < 100 + 2900 / 64 * 1.4
    rows = np.arange(ROWS)
    np.testing.assert_allclose(counted(touches, rows).mean(axis=1), exact(steps, rows).mean(axis=1), rtol=0.03)


def test_a_row_that_was_pruned_is_followed_from_the_last_prune():
    random = np.random.default_rng(5)
    touches = TableTouches(10**9, 64)
    for number in range(126):
        rows = random.choice(10**9 - 100, 1000, replace=False) + 100
        # 66 batches fill the buffer: the table is pruned before row 7 is seen.
        touches.add(np.append(rows, 7) if number >= 66 else rows, 0, None, 0.0, FOREVER)
    assert touches.read(np.array([7]), FOREVER, LAYOUT).per_rank[0] == 1.0


def feed_passes(touches: TableTouches, steps, first: int = 0) -> None:
    """Give each rank's passes in messages of seven, as taps do, one rank behind the others."""
    for start in range(0, len(steps), 7):
        for rank in range(LAYOUT.world_size):
            for number in range(start, min(start + 7, len(steps))):
                rows = steps[number][rank]
                touches.add_pass(np.unique(rows), len(rows), rank, first + number, 0.0, FOREVER)


def test_sampled_passes_of_a_tap_reach_the_touches_of_their_table():
    sketches = SketchSet([TableSpec("t", ROWS, 4)], SketchSettings(half_life_seconds=None))
    sketches.profile(layout=LAYOUT)
    steps = correlated(21)
    for rank in range(LAYOUT.world_size):
        passes = [
            PassRows(number, (np.unique(ranks[rank]), np.arange(9)), (len(ranks[rank]), 9))
            for number, ranks in enumerate(steps)
        ]
        sketches.ingest_tap(TapCounts(rank, 1.0, (), TapPasses(("t", "nobody"), tuple(passes))))
    sketches._tables["t"].touches.flush(sketches._decay)
    rows = np.arange(ROWS)
    np.testing.assert_allclose(counted(sketches._tables["t"].touches, rows), exact(steps, rows), rtol=1e-12)


def test_passes_of_a_training_that_starts_again_count_for_nodes_at_once():
    first, second = correlated(63), correlated(21, seed=1)
    touches = table()
    touches._seen_accesses = 2**40  # a log would be sampled by now; these passes are a sample already
    feed_passes(touches, first)
    feed_passes(touches, second)
    touches.flush(FOREVER)
    rows = np.arange(ROWS)
    np.testing.assert_allclose(counted(touches, rows), exact(first + second, rows), rtol=1e-12)
    assert touches.read(rows, FOREVER, LAYOUT).accesses == 40


def test_a_step_waits_for_partitions_that_are_read_later_and_not_for_those_that_publishers_left():
    steps = correlated(300)
    touches = table()
    feed_partitions = [(step, rank) for step in range(300) for rank in range(LAYOUT.world_size)]
    for step, rank in feed_partitions:  # the first partition has one half of each batch
        touches.add(steps[step][rank][:20], rank, step, 0.0, FOREVER, "first")
        if not step:
            touches.add(steps[step][rank][20:], rank, step, 0.0, FOREVER, "second")
        if step == 100 and rank == 3:
            for late, of in feed_partitions[4:404]:
                touches.add(steps[late][of][20:], of, late, 0.0, FOREVER, "second")
            np.testing.assert_allclose(counted(touches, np.arange(ROWS)), exact(steps[:100], np.arange(ROWS)))
    # Nothing came from the second partition for more than 128 steps.
    assert len(touches._open) <= 17


def test_no_step_is_counted_while_a_backlog_is_read():
    steps = correlated(100)
    touches = table()
    touches.set_backlog(True, FOREVER)
    for partition, part in (("first", slice(20)), ("second", slice(20, None))):
        for step, ranks in enumerate(steps):
            for rank, rows in enumerate(ranks):
                touches.add(rows[part], rank, step, 0.0, FOREVER, partition)
    assert touches.read(np.arange(ROWS), FOREVER, LAYOUT) is None
    touches.set_backlog(False, FOREVER)
    np.testing.assert_allclose(counted(touches, np.arange(ROWS)), exact(steps[:99], np.arange(ROWS)))
    endless = table()
    endless.set_backlog(True, FOREVER)
    feed(endless, correlated(200))
    assert len(endless._open) <= 17
