"""Send each user's samples to a partition that a rank of her node reads, so that training ships nothing.

    flexd affinity users -o nodes.npz
    python examples/node_partitions.py --nodes nodes.npz --local-ranks 4 --users 17 42 1001

A topic has one partition for each rank: ``partition_of`` gives the producer the partition of a user, and a trainer
assigns partition ``rank`` to itself. Users of a node are spread over its ranks by their id.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.affinity import NodeMap


def partition_of(users: npt.ArrayLike, node_map: NodeMap, local_ranks: int) -> npt.NDArray[np.int64]:
    """Return int64 [n]: the partition, which is the rank, of each user's samples."""
    ids = np.asarray(users).astype(np.int64)
    # Unknown users are in node ``id % nodes``: the rest of the id decides the rank.
    return node_map.node_of(ids) * local_ranks + ids // node_map.nodes % local_ranks


def produce(producer: Any, topic: str, user: int, sample: bytes, node_map: NodeMap, local_ranks: int) -> Any:
    """Send a sample with a ``kafka.KafkaProducer``."""
    return producer.send(topic, sample, partition=int(partition_of([user], node_map, local_ranks)[0]))


def assign_partition(consumer: Any, topic: str, rank: int) -> None:
    """Let a ``kafka.KafkaConsumer`` read the samples of a rank."""
    from kafka import TopicPartition

    consumer.assign([TopicPartition(topic, rank)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", required=True, metavar="FILE.npz", help="written by flexd affinity")
    parser.add_argument("--local-ranks", type=int, default=8)
    parser.add_argument("--users", type=int, nargs="+", required=True)
    options = parser.parse_args()
    # A producer that runs for long loads the file again when it is replaced.
    node_map = NodeMap.load(options.nodes)
    for user, partition in zip(
        options.users, partition_of(options.users, node_map, options.local_ranks).tolist(), strict=True
    ):
        print(f"user {user}: partition {partition}")


if __name__ == "__main__":
    main()
