"""Avro data as values of Python: only the fields that are asked for, by a compiled reader."""
