"""The resources of the daemon: one module each, with its model, the query that reads it, its commands and its metrics.

The admin API, the command line, the status page and the metrics page all use these models. A module imports pydantic
only when it is loaded, so that the command line starts fast; what it needs to query a running daemon is imported where
it is used.
"""
