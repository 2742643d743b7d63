"""Chunks of a migration, applied between two steps."""
