"""Every mode of a step on pretended CUDA tensors: no tensors of two devices meet, no ``numpy()`` of a device's tensor,
and the host waits for the device at most as often as the budget of ``tools.bench step`` allows."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import flexd
from flexd.core.placement import Delta, RankLayout, Tier
from flexd.embedding.checkpoint import sharded_state, table_rows
from flexd.embedding.checkpoint.sharded_state import ShardedState
from flexd.embedding.row_optimizers import RowOptimizer
from tests.support.collection_jobs import whole_state_dict
from tests.support.pretended_cuda import DEVICE, LookupWithoutAutograd, PretendedCuda
from tests.support.slots_of_share import slots_of_share
from tools.bench.mirror_ranks import MirrorPeers, mirrored
from tools.bench.sections.dispatch import MAX_WAITS, Case, batch, keyspace_of, placement, tables_of

SMALL, LARGE = RankLayout(2, 2), RankLayout(16, 8)


@dataclass
class Job:
    """A collection of rank 0 of a job on pretended CUDA tensors."""

    case: Case
    cuda: PretendedCuda
    collection: Any

    def batches(self, number: int) -> list[dict[str, flexd.Jagged]]:
        made = []
        for seed in range(number):
            features = batch(self.case, seed).items()
            made.append({name: flexd.Jagged(f.values.to(DEVICE), f.lengths.to(DEVICE)) for name, f in features})
        return made

    def step(self, given: Any) -> None:
        self.collection(given)
        LookupWithoutAutograd.backward()
        self.collection.optimizer.step()

    def waits_of(self, given: Any) -> int:
        self.cuda.waits.clear()
        self.cuda.lines.clear()
        self.step(given)
        return self.cuda.waits.total()


@contextmanager
def job(
    layout: RankLayout, *, exchange: str = "chain", pooled: bool = False, copies: float = 0.05,
    optimizer: RowOptimizer | None = None, comm_dtype: str | None = None, sums: float = 0.0,
) -> Iterator[Job]:  # fmt: skip
    """Rank 0 of a job of three tables in three dim-groups, with copies from its first step on."""
    case = Case("", layout, 3, 64, copies, pooled, exchange, sums)
    keyspace = keyspace_of(case)
    make = flexd.EmbeddingBagCollection if pooled else flexd.EmbeddingCollection
    with PretendedCuda().running() as cuda, mirrored([(g.first_key, g.end_key) for g in keyspace.groups]):
        collection = make(
            tables_of(case), layout=layout, optimizer=optimizer or flexd.RowWiseAdagrad(),
            replica_slots=slots_of_share(tables_of(case), 0.2, optimizer),
            device="cuda", exchange=exchange, comm_dtype=comm_dtype,
        )  # fmt: skip
        made = Job(case, cuda, collection)
        if copies:
            collection.engine.inbox.offer(1, placement(case, keyspace))
            made.step(made.batches(1)[0])
        yield made


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (SMALL, {"exchange": "chain"}),
        pytest.param(SMALL, {"exchange": "direct", "optimizer": flexd.Adam(weight_decay=0.1)}, marks=pytest.mark.long),
        pytest.param(SMALL, {"comm_dtype": "bfloat16", "optimizer": flexd.RowWiseAdam()}, marks=pytest.mark.long),
        pytest.param(
            SMALL, {"comm_dtype": "float16", "copies": 0.0, "optimizer": flexd.Adagrad()}, marks=pytest.mark.long
        ),
        (SMALL, {"pooled": True}),
        pytest.param(SMALL, {"pooled": True, "sums": 0.5}, marks=pytest.mark.long),
        pytest.param(LARGE, {"exchange": "chain"}, marks=pytest.mark.long),
        pytest.param(LARGE, {"exchange": "direct", "pooled": True, "comm_dtype": "bfloat16"}, marks=pytest.mark.long),
        pytest.param(
            LARGE, {"pooled": True, "sums": 1.0, "copies": 0.0, "comm_dtype": "float16"}, marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_a_step_mixes_no_devices_and_waits_within_the_budget(layout: RankLayout, settings: dict[str, Any]) -> None:
    with job(layout, **settings) as made:
        assert max(made.waits_of(given) for given in made.batches(2)) <= MAX_WAITS, made.cuda.lines
        with torch.no_grad():
            out = made.collection(made.batches(1)[0])
        assert all((rows if isinstance(rows, torch.Tensor) else rows.values).device == DEVICE for rows in out.values())
        assert made.collection.placement_version == (1 if settings.get("copies", 1) else 0)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "pooled", "comm_dtype"), [(SMALL, True, "bfloat16"), (LARGE, False, None)])
def test_prefetch_pipeline_mixes_no_devices_and_waits_within_the_budget(
    layout: RankLayout, pooled: bool, comm_dtype: str | None
) -> None:
    """A job waits as often as a step; a chunk arrives in the middle."""
    with job(layout, pooled=pooled, comm_dtype=comm_dtype) as made:
        collection = made.collection
        listed = placement(made.case, collection.keyspace)
        delta = Delta(listed.keys[:8], listed.new_tiers[:8], np.full(8, int(Tier.HOME), np.uint8))
        waits = []
        for number, given in enumerate(flexd.prefetch(made.batches(5), collection)):
            if number == 2:
                collection.engine.inbox.offer(2, delta)
            waits.append(made.waits_of(given))
            assert waits[-1] <= 2 * MAX_WAITS, made.cuda.lines
        assert collection.placement_version == 2


def test_everything_beside_a_step_mixes_no_devices() -> None:
    with job(SMALL) as made:
        collection, given = made.collection, made.batches(1)[0]
        collection(given)
        LookupWithoutAutograd.backward()
        assert collection.clip_grad_norm_(1.0).device == DEVICE
        collection.optimizer.step()
        offsets = torch.tensor([0, 3, 64], device=DEVICE)
        made.step({"t0": flexd.Jagged.from_offsets(given["t0"].values, offsets)})
        tap = flexd.Tap(collection)
        made.step(given)
        assert tap._swap()
        assert tap._full is not None
        tap._read(tap._full)
        assert {name: counts.accesses for name, counts in tap._pending.items()} == {"t0": 64, "t1": 64, "t2": 64}
        collection.load_rows("t1", 2, torch.ones(5, 32))
        made.step(given)
        collection.load_state_dict(collection.state_dict())
        made.step(given)
        collection.memory()


def test_tables_leave_the_device_window_by_window() -> None:
    """No second copy of a table on the device: neither for ``state_dict`` nor for whole tables."""
    window_bytes = 2**16
    with job(SMALL, copies=0.0) as made, mock.patch.object(table_rows, "MAX_WINDOW_BYTES", window_bytes):
        collection = made.collection
        assert max(store.rows.nbytes for store in collection.engine.stores) > 2 * window_bytes
        made.cuda.largest_bytes = 0
        collection.gather_table("t0", device="cpu")
        whole = whole_state_dict(collection)
        local = collection.state_dict()
        assert 0 < made.cuda.largest_bytes <= window_bytes + 1, "a mirrored message has a byte more"
        assert {value.device.type for state in (whole, local) for value in state.values()} == {"cpu"}
        collection.load_state_dict(local)
        made.step(made.batches(1)[0])


@pytest.mark.parametrize("in_blocks", [False, pytest.param(True, marks=pytest.mark.long)])
def test_checkpoints_communicate_on_the_device_of_the_tables_alone(in_blocks: bool) -> None:
    """A job whose only backend is NCCL has no other collectives."""
    devices: Counter[str] = Counter()

    def recorded(method: str) -> Any:
        of_mirror = getattr(MirrorPeers, method)

        def call(peers: MirrorPeers, tensor: torch.Tensor, *more: Any, **named: Any) -> Any:
            devices[f"{method} {tensor.device.type}"] += 1
            return of_mirror(peers, tensor, *more, **named)

        return mock.patch.object(MirrorPeers, method, call)

    with job(SMALL, copies=0.0) as made, ExitStack() as stack:
        for method in ("all_to_all", "all_reduce", "all_gather"):
            stack.enter_context(recorded(method))
        if in_blocks:
            stack.enter_context(mock.patch.object(table_rows, "MAX_WINDOW_BYTES", 2**16))
            # Only DTensors, which need a process group, have the shape of the table.
            stack.enter_context(mock.patch.object(sharded_state, "_differences", return_value=[]))
        state = ShardedState(made.collection).state_dict()
        on_device = ShardedState(made.collection, DEVICE).state_dict()
        whole_state_dict(made.collection)
        ShardedState(made.collection).load_state_dict(state)
        weights = [value.device.type for key, value in on_device.items() if key.endswith(".weight")]
    assert set(weights) == {"cuda"}
    assert {value.device.type for value in state.values()} == {"cpu"}
    assert set(devices) == {"all_to_all cuda", "all_reduce cuda"}, devices


def test_chunks_are_prepared_on_a_stream_of_their_own_and_training_waits_for_their_event() -> None:
    with job(SMALL, copies=0.0) as made:
        cuda, engine = made.cuda, made.collection.engine
        given = made.batches(1)[0]
        chunk = placement(Case("", SMALL, 3, 64, 0.05), made.collection.keyspace)

        def agent() -> None:
            with cuda:
                engine.inbox.offer(1, chunk)
                assert len(engine.migrator.placement()[0]) == 0

        cuda.queued.clear()
        cuda.streams.calls.clear()
        thread = threading.Thread(target=agent, name="agent")
        thread.start()
        thread.join(60)
        streams = {stream for (name, stream), _ in cuda.queued.items() if name == "agent"}
        assert len(streams) == 1
        assert streams != {"default"}
        ((_, event, recorded_on),) = cuda.streams.of("record")
        assert {recorded_on} == streams
        made.step(given)
        made.step(given)
        assert made.collection.placement_version == 1
        assert cuda.streams.of("wait_event") == [(threading.current_thread().name, "default", event)]
        # Directories and slots that the other stream made stay until training has read them.
        assert len({shape for _, shape, _ in cuda.streams.of("record_stream")}) > 1
        assert {stream for *_, stream in cuda.streams.of("record_stream")} == {"default"}
        assert not cuda.streams.of("synchronize")
