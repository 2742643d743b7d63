"""Division of a rank's fast memory between frames of home rows and replica slots."""
