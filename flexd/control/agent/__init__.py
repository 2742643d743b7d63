"""The ranks' side of the control channel: one background thread per rank."""
