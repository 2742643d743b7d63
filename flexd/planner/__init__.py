"""Choose the tier of every row: pure functions of a profile, a layout and a cluster description."""
