"""The channel between the daemon and the training ranks: control only, never row values."""
