"""Certificates of authorities that live for one test."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.datetime.now(datetime.UTC)


class Authority:
    """``file`` holds its own certificate; ``issue`` makes those of daemons."""

    def __init__(self, folder, name="authority"):
        self.folder, self.name = folder, name
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.file = str(folder / f"{name}.pem")
        self.certificate = self._sign(self.key, name, ca=True)
        self._write(self.file, self.certificate)

    def issue(self, name="127.0.0.1"):
        """Certificate and key of a daemon, as two files."""
        key = ec.generate_private_key(ec.SECP256R1())
        files = str(self.folder / f"{name}.crt"), str(self.folder / f"{name}.key")
        self._write(files[0], self._sign(key, name, ca=False))
        with open(files[1], "wb") as out:
            out.write(key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ))  # fmt: skip
        return files

    def _sign(self, key, name, *, ca):
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = subject if ca else self.certificate.subject
        try:
            known = x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            known = x509.DNSName(name)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - datetime.timedelta(days=1))
            .not_valid_after(NOW + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([known]), critical=False)
        )
        return builder.sign(self.key, hashes.SHA256())

    def _write(self, file, certificate):
        with open(file, "wb") as out:
            out.write(certificate.public_bytes(serialization.Encoding.PEM))
