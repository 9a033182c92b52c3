"""Certificates for tests: an authority, and what it signs for 127.0.0.1."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_LOOPBACK = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])


class Authority:
    """Example: `authority = Authority(folder); certificate, key = authority.sign("server", days=1)`; negative days: expired."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca = folder / f"{name}.pem"
        signed = self._begun(self._name, self._key, days=10).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.ca.write_bytes(signed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *, days: int) -> tuple[Path, Path]:
        """Files with a certificate, valid for so many days from now, and its key. Written again for the same name."""
        key = ec.generate_private_key(ec.SECP256R1())
        begun = self._begun(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, days=days)
        signed = begun.add_extension(_LOOPBACK, critical=False).sign(self._key, hashes.SHA256())
        certificate, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        return certificate, key_file

    def _begun(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: int) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=20))
            .not_valid_after(now + datetime.timedelta(days=days))
        )
