"""HTTPS: a certificate and its key, read at the start and again at SIGHUP, so that a renewed one needs no restart."""

from __future__ import annotations

import ssl

from ..core.errors import UsageError

__all__ = ["Tls"]


class Tls:
    """cert: PEM file with the certificate and its chain; key: PEM file, None: in the same file.

    Raises UsageError for files that cannot be read, do not belong together, or hold a key with a password.
    """

    def __init__(self, cert: str, key: str | None):
        self._cert, self._key = cert, key or cert
        self.context = _context()
        self.read()

    def read(self) -> None:
        """The files anew, for connections from now on. On an error the old ones stay."""
        for context in (_context(), self.context):  # a context keeps what it has read before it fails: try on another first
            try:
                context.load_cert_chain(self._cert, self._key, password=_no_password)
            except ssl.SSLError as error:
                self._fail(error.reason or "there is no certificate with its key in PEM")
            except OSError as error:
                self._fail(error.strerror or str(error))

    def _fail(self, why: str) -> None:
        files = f"--tls-cert {self._cert}" + (f" --tls-key {self._key}" if self._key != self._cert else "")
        raise UsageError(f"{files}: {why}", fix="name a certificate and its key, both in PEM") from None


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _no_password() -> str:
    raise UsageError("--tls-key: the key has a password, which nobody is asked for", fix="store it without, readable by the server only")
