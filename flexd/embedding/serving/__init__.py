"""Whole tables for serving: read block by block, as modules that need no other rank."""
