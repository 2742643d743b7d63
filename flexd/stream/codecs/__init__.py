"""Encode and decode messages of the stream."""
