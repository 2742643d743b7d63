"""Checks of a daemon's surroundings: configuration, host, stream, control channel, and the daemon itself."""
