"""One certificate authority in place of the system's hundred and fifty, for the length of a test run.

Every client that is made reads all of them, whether it will speak TLS or not: 30 ms of a processor each time, in tests and in every process
that tests start. No test speaks to anybody whom an authority of the system vouches for; those of TLS bring authorities of their own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import certifi

VARIABLE = "SSL_CERT_FILE"
"""Read by OpenSSL, and by httpx."""
_LAST_LINE = "-----END CERTIFICATE-----\n"


@contextmanager
def one_authority() -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    first, end, _ = Path(certifi.where()).read_text().partition(_LAST_LINE)
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(first + end)
        file.flush()
        os.environ[VARIABLE] = file.name
        try:
            yield
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before
