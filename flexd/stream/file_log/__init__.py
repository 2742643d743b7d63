"""The embedded stream: append-only segment files with offsets, one directory a partition, no broker."""
