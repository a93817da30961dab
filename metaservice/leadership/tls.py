"""Certificates of this replica towards its elector."""

import os
import ssl


class ClientTls:
    """The context for new connections, made anew when one of its files has changed: certificates are renewed
    while the service runs."""

    def __init__(self, ca: str = "", cert: str = "", key: str = "") -> None:
        """PEM files; `ca` '' takes the system's authorities. Raises OSError (ssl.SSLError is one) when one
        cannot be read."""
        self._ca = ca
        self._cert = cert
        self._key = key
        self._stamp = self._files()
        self._context = self._made()

    def context(self) -> ssl.SSLContext:
        """Raises OSError when a changed file cannot be read."""
        stamp = self._files()
        if stamp != self._stamp:
            self._context = self._made()
            self._stamp = stamp
        return self._context

    def _made(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._ca or None)
        if self._cert:
            context.load_cert_chain(self._cert, self._key)
        return context

    def _files(self) -> list[tuple[int, int]]:
        stats = [os.stat(path) for path in (self._ca, self._cert, self._key) if path]
        return [(stat.st_mtime_ns, stat.st_size) for stat in stats]
