"""Makes the keys and certificates of a deployment, in one folder:

    ca.crt, ca.key           signs the server's certificate; nodes and `flwr` trust only ca.crt
    server.crt, server.key   the SuperLink's certificate, for its host names
    server.secret            shared by the SuperLink and its superexec
    node-1, node-1.pub, ...  a key pair per node; the SuperLink registers the public key
    node-1.secret, ...       shared by a node's SuperNode and its worker

Existing files are kept. A second call adds nodes, and renews the server's certificate if hosts are
given. Only the owner can read private files.
"""

import datetime
import ipaddress
import os
import re
import secrets
from pathlib import Path

from mixfl.errors import MixflError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID
except ImportError as error:
    raise MixflError(f"keys: {error}. Install Flower: pip install 'mixfl[flower]'") from None

HOSTS = ("localhost", "127.0.0.1")
NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([\w-]*\w)?(\.[A-Za-z0-9_]([\w-]*\w)?)*", re.ASCII)
YEAR = datetime.timedelta(days=365)


def make_keys(folder: Path, nodes: int = 3, hosts: tuple[str, ...] = ()) -> list[Path]:
    """Returns the files that were written."""
    names = {host: _host(host) for host in [*hosts, *HOSTS]}  # check before writing anything
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = _Files(folder)
    authority = _authority(files)
    if hosts or not (folder / "server.crt").exists():
        _server(files, *authority, names)
    if not (folder / "server.secret").exists():
        files.write("server.secret", secrets.token_bytes(32), private=True)
    for n in range(1, nodes + 1):
        if not (folder / f"node-{n}").exists():
            _node(files, f"node-{n}")
    return files.written


class _Files:
    def __init__(self, folder: Path):
        self.folder, self.written = folder, list[Path]()

    def write(self, name: str, content: bytes, private: bool = False) -> None:
        """Writes the whole file or nothing. A private file is never readable by others."""
        path = self.folder / name
        temporary = path.with_name(f"{name}.new")
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(temporary, flags, 0o600 if private else 0o644), "wb") as file:
            file.write(content)
        temporary.replace(path)
        self.written.append(path)


def _authority(files: _Files) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate, key = files.folder / "ca.crt", files.folder / "ca.key"
    if certificate.exists() and not key.exists():
        raise MixflError(
            f"{certificate} exists, but its key {key} is missing: put the key back, or give "
            "another folder to make keys for a new deployment."
        )
    if certificate.exists():
        try:
            private = serialization.load_pem_private_key(key.read_bytes(), None)
            loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
        except (ValueError, TypeError) as error:
            raise MixflError(f"{certificate} or {key} can't be read: {error}.") from None
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise MixflError(
                f"{key} is not an elliptic-curve key: give another folder to make new keys."
            )
        return loaded, private
    private = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mixfl deployment CA")])
    built = (
        _certificate(name, name, private.public_key(), 10 * YEAR)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .sign(private, hashes.SHA384())
    )
    files.write("ca.key", _pem(private), private=True)
    files.write("ca.crt", built.public_bytes(serialization.Encoding.PEM))
    return built, private


def _server(
    files: _Files, authority: x509.Certificate, signer, hosts: dict[str, x509.GeneralName]
) -> None:
    private = ec.generate_private_key(ec.SECP384R1())
    first = next(iter(hosts))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, first[:64])])
    built = (
        _certificate(name, authority.subject, private.public_key(), 2 * YEAR)
        .add_extension(x509.SubjectAlternativeName(hosts.values()), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA384())
    )
    files.write("server.key", _pem(private), private=True)
    files.write("server.crt", built.public_bytes(serialization.Encoding.PEM))


def _node(files: _Files, name: str) -> None:
    private = ec.generate_private_key(ec.SECP384R1())
    public = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    files.write(f"{name}.pub", public + b"\n")
    files.write(f"{name}.secret", secrets.token_bytes(32), private=True)
    files.write(name, _pem(private, serialization.PrivateFormat.OpenSSH), private=True)


def _certificate(name, issuer, public, life: datetime.timedelta) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    every = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
        "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in every})


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not NAME.fullmatch(host):
        raise MixflError(
            f"--host '{host}': expected a host name such as fl.example.org, or an address. "
            "To give several, repeat --host."
        )
    return x509.DNSName(host)


def _pem(key, form=serialization.PrivateFormat.PKCS8) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
