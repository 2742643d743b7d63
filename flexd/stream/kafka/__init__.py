"""The stream over Kafka: source, sink and what they share."""
