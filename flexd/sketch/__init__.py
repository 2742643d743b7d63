"""Sketches of the access stream: counters by table, hot rows, quantiles, profiles, snapshots."""
