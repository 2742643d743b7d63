"""The tap: counts look-ups on the training device and ships the counts."""
