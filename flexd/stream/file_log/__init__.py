"""A stream in files, without a broker: append-only segments with offsets, one directory a partition."""
