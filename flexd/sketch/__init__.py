"""What the daemon remembers of the access stream."""
