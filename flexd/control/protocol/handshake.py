"""The handshake of the control channel: both ends prove the shared secret before anything else is read.

Skeleton: ``ClientHandshake`` and ``ServerHandshake`` are states without sockets; client and server feed them bytes.
"""

from __future__ import annotations
