"""Counters of accesses by row: dense (exact), logarithmic, and count-min with a hot set."""
