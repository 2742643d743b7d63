"""Sketches of the access stream: counters by table, hot rows, profiles, snapshots."""
