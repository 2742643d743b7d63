"""Sources that the daemon reads accesses from, sinks that trainers write them to, and their message formats."""
