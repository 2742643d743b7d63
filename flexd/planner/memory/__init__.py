"""How much fast memory of a rank a slowdown saves."""
