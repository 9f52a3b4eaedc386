"""TLS of our listeners and of our own connections to them, from `security.tls_*`. Used by the router, the fronts and the cli."""

from __future__ import annotations

import ssl

from pd_serve.config import SecurityConfig
from pd_serve.errors import ConfigError


def server_tls(security: SecurityConfig) -> ssl.SSLContext | None:
    """None: plain HTTP. Raises ConfigError, one line, for half a setting or a file that is none."""
    if not security.tls_cert and not security.tls_key:
        return None
    if not security.tls_cert or not security.tls_key:
        raise ConfigError("security.tls_cert and security.tls_key belong together: one of them is missing")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(security.tls_cert, security.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use {security.tls_cert} with {security.tls_key}: {error}") from error
    return context


def client_tls(security: SecurityConfig) -> ssl.SSLContext:
    """For connections to https:// addresses: the server must show a certificate of `tls_ca` (empty: of the system's) for its host name."""
    try:
        return ssl.create_default_context(cafile=security.tls_ca or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use security.tls_ca {security.tls_ca}: {error}") from error


def tls_trouble(error: BaseException) -> str:
    """Why TLS is what a connection failed at, and what to do about it; empty: it is not, or only for the moment."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    match cause:
        case ssl.SSLCertVerificationError(verify_code=code, verify_message=message) if code in _OTHER_HOST:
            return f"{message}: use a name that its certificate (security.tls_cert there) is for, or give it one for this name"
        case ssl.SSLCertVerificationError(verify_message=message):
            return f"its certificate is not trusted ({message}): name its authority's PEM file in security.tls_ca"
        case ssl.SSLError(reason=reason) if reason in _PLAIN_HTTP:
            return "it does not speak TLS: its address begins with http://"
    return ""


_OTHER_HOST = frozenset({62, 64})
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL's x509_vfy.h."""
_PLAIN_HTTP = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})
"""What OpenSSL 1.1 and 3 call an answer that is no TLS record."""
