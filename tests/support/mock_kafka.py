"""librdkafka's mock Kafka cluster, which behaves as Kafka does where tansu does not."""

from __future__ import annotations

import ctypes
import uuid
from typing import ClassVar

import confluent_kafka.cimpl

_PRODUCER = 0
_ALL_BROKERS = -1


class MockKafka:
    """A context manager that runs a cluster of one broker in this process, through librdkafka's C interface.

    The Python client can start a mock cluster too, but not shorten the three seconds for which the first rebalance of
    each group waits for further members.

    Args:
        round_trip_ms: delay of every response.
    """

    client_options: ClassVar = {"api_version": "2.3"}
    """For its clients: it answers no request for the versions that it speaks."""

    def __init__(self, round_trip_ms: int = 0) -> None:
        self._library = library = ctypes.CDLL(confluent_kafka.cimpl.__file__)
        for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
            getattr(library, name).restype = ctypes.c_void_p
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        error = ctypes.create_string_buffer(512)
        configuration = ctypes.c_void_p(library.rd_kafka_conf_new())
        library.rd_kafka_conf_set(configuration, b"log_level", b"0", error, ctypes.c_size_t(len(error)))
        client = library.rd_kafka_new(_PRODUCER, configuration, error, ctypes.c_size_t(len(error)))
        assert client, error.value.decode()
        self._client = ctypes.c_void_p(client)
        self._cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(self._client, 1))
        assert self._cluster.value
        library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, ctypes.c_int32(100))
        library.rd_kafka_mock_broker_set_rtt(self._cluster, ctypes.c_int32(_ALL_BROKERS), round_trip_ms)
        self.bootstrap_servers: str = library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def __enter__(self) -> MockKafka:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)

    def create_topic(self, partitions: int) -> str:
        """Create a topic of a new name and return the name."""
        topic = f"topic-{uuid.uuid4().hex[:8]}"
        failed = self._library.rd_kafka_mock_topic_create(self._cluster, topic.encode(), partitions, 1)
        assert failed == 0
        return topic
