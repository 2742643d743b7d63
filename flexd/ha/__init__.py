"""High availability: elect one leader among several daemons by a lease, and fence the state of earlier leaders.

A lease store (a shared directory or a Kubernetes object) outlives every daemon; each leadership has a term number that
only grows and a state directory of its own. Knows nothing of the API and the daemon's parts.
"""
