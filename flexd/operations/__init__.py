"""Operate a running job: trigger and gate plans, execute and pace migrations, roll back, watch drift, keep history.

Reads the configuration, sketches and the control channel; knows nothing of HTTP, the command line or processes.
"""
