"""Which row belongs in which tier: pure functions of a profile, a layout and a cluster."""
