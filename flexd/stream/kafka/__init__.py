"""The stream over Kafka, with kafka-python: source, sink and the parts that they share."""
