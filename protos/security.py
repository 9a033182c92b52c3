"""TLS and the bearer token of one service: what the configuration says, and what it comes to. Imports pydantic and the standard library only.

A server that others can reach speaks TLS and asks for a token, or its configuration says in so many words that it does not. Secrets are
named (an environment variable, a file), never written into a configuration, so that none ends in a log, a report or a resolved file.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True, kw_only=True, slots=True)
class Security:
    """Credentials of one side. All empty: plain text without a token.

    Example: `Security(token="s3cret", ca=Path("ca.pem"))` on a client of a TLS server.
    """

    token: str = field(default="", repr=False)  # empty: no token is sent or asked for
    certificate: Path | None = None  # server: its chain, PEM
    key: Path | None = None  # server: its private key, PEM
    ca: Path | None = None  # client: whom to trust, PEM


OPEN = Security()


class SecurityConfig(BaseModel):
    """The section `security` of every service."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    token_env: str = Field("", description="environment variable that holds the bearer token")
    token_file: Path | None = Field(None, description="file that holds the bearer token, alone")
    certificate: Path | None = Field(None, description="this service's certificate chain, PEM; serves TLS")
    key: Path | None = Field(None, description="the certificate's private key, PEM")
    ca: Path | None = Field(None, description="certificates that other services' are checked against, PEM; calls them by TLS")
    off: tuple[Literal["tls", "token"], ...] = Field((), description="what a service that others can reach does without, said explicitly")


def is_loopback(address: str) -> bool:
    """Whether `host:port` can only be reached from this machine."""
    host = address.rsplit(":", 1)[0].strip("[]")
    if host == "localhost" or address.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolve(config: SecurityConfig, *, address: str = "") -> Security:
    """The credentials that a configuration names. address: where this service listens; empty: it only calls others.

    Raises ValueError in one line for a secret or a file that is not there, half a pair, or an address that others can reach without TLS
    and a token while `off` does not say so.
    """
    if (config.certificate is None) != (config.key is None):
        raise ValueError(f"security: certificate={config.certificate} and key={config.key}: a server needs both; give the other one, too")
    for name in ("certificate", "key", "ca"):
        _check_file(f"security.{name}", getattr(config, name))
    _check_pem(config)
    token = secret("security", config.token_env, config.token_file)
    if address and not is_loopback(address):
        lacks = [word for word, there in (("tls", config.certificate is not None), ("token", bool(token))) if not there and word not in config.off]
        if lacks:
            raise ValueError(
                f"address={address} can be reached from other machines, and security gives no {' and no '.join(lacks)}; "
                f"give certificate, key and token_file (or token_env), listen on 127.0.0.1, or say security.off: [{', '.join(lacks)}]"
            )
    return Security(token=token, certificate=config.certificate, key=config.key, ca=config.ca)


def secret(where: str, variable: str, file: Path | None) -> str:
    """A secret from an environment variable or a file; empty: neither is named. Raises ValueError naming the place, never the secret."""
    if variable and file is not None:
        raise ValueError(f"{where}: token_env={variable} and token_file={file}: one place only; remove one")
    if variable:
        found = os.environ.get(variable, "").strip()
        if not found:
            raise ValueError(f"{where}.token_env={variable}: this environment variable is not set; set it, or give token_file")
    elif file is not None:
        _check_file(f"{where}.token_file", file)
        found = file.read_text().strip()
    else:
        return ""
    if not found or not found.isascii() or not found.isprintable() or " " in found:
        raise ValueError(f"{where}: the token in {variable or file} must be one word of printable ASCII characters, and {'there is none' if not found else 'is something else'}; write one there")
    return found


def _check_pem(config: SecurityConfig) -> None:
    """gRPC would take what is no certificate, and fail at the first call, or say that the port is taken. Raises ValueError."""
    if config.certificate is not None and config.key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.certificate, config.key, password=lambda: b"")  # a key with a pass phrase is refused, not asked for
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(f"security.certificate={config.certificate}, security.key={config.key}: no certificate chain in PEM with its private key, without a pass phrase ({_words(error)}); give the two that belong together") from None
    if config.ca is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(config.ca)
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(f"security.ca={config.ca}: holds no certificate in PEM ({_words(error)}); give the file with the authority's certificate") from None


def _words(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error).replace("_", " ").lower()


def _check_file(key: str, path: Path | None) -> None:
    if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
        raise ValueError(f"{key}={path}: no file that can be read; give the path of a PEM file or a token file")
