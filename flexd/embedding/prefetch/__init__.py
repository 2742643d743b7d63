"""Prefetch pipeline: exchange for the next batch while a step computes."""
