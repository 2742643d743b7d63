"""Headers of requests to the admin API."""

from flexd.api.base import REQUEST_HEADER

COMMAND_HEADERS = {REQUEST_HEADER: "test"}
"""Needed by every POST."""
