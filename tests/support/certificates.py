"""Certificates of both ends of the control channel, signed by a CA of the test."""

from __future__ import annotations

import os
from pathlib import Path

import trustme

from flexd.control.protocol.handshake import TlsFiles


class Authority:
    """A CA and what it has signed, as files."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self.directory = directory
        self.ca = trustme.CA()
        self.ca_file = directory / f"{name}.pem"
        self.ca.cert_pem.write_to_path(str(self.ca_file))

    def issue(self, name: str, *hosts: str, trusts: Authority | None = None) -> TlsFiles:
        """Write a certificate for ``hosts`` with its key; files that are there are replaced as a whole."""
        issued = self.ca.issue_cert(*hosts or (f"{name}.test",), common_name=name)
        certificate, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        for path, pem in ((key, issued.private_key_pem), (certificate, issued.cert_chain_pems[0])):
            pem.write_to_path(f"{path}.new")
            os.replace(f"{path}.new", path)
        return TlsFiles(certificate, key, (trusts or self).ca_file)
