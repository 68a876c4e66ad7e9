"""Key agreement (X25519), derived keys (HKDF-SHA256), sealed boxes (ChaCha20-Poly1305), and
signatures of a client's keys by its node's own key (ECDSA)."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mixfl.deploy.secure.parts import Advert, Refused, packed
from mixfl.errors import MixflError

TAG = 16  # bytes that a box is longer than what is in it


def derived(secret: bytes, *info: Any) -> bytes:
    """32 bytes that follow from a secret and from what they are for."""
    return HKDF(hashes.SHA256(), 32, None, packed(["mixfl secure 1", *info])).derive(secret)


def private_key(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derived(seed, "key"))


def public_key(seed: bytes) -> bytes:
    return private_key(seed).public_key().public_bytes_raw()


def agreed(own: X25519PrivateKey, other: bytes) -> bytes:
    """What two clients know and nobody else: from one's private key and the other's public one."""
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:  # of another length, or of a small order
        raise Refused("a public key in the roster is none.") from None


# The key of a box is used once: both key pairs belong to one round, and the key to one direction.
NONCE = bytes(12)


def sealed(key: bytes, content: bytes) -> bytes:
    return ChaCha20Poly1305(key).encrypt(NONCE, content, None)


def opened(key: bytes, box: bytes) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(NONCE, box, None)
    except InvalidTag:
        raise Refused("a sealed box was not sealed for this client and round.") from None


# Signatures

Sign = Callable[[str, Advert], Advert]
Check = Callable[[str, list[Advert]], None]


def _signed(run: str, advert: Advert) -> bytes:
    return packed(["mixfl advert 1", run, advert.seal, advert.mask])


def _fingerprint(key: ec.EllipticCurvePublicKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).digest()[:16]


def signer(file: Path) -> Sign:
    """Signs with the private key in a file, as `mixfl flower keys` makes it for a node."""
    try:
        key = serialization.load_ssh_private_key(file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise MixflError(f"secure-key = {file}: {error}.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise MixflError(f"secure-key = {file}: expected a key on an elliptic curve.")

    def sign(run: str, advert: Advert) -> Advert:
        signature = key.sign(_signed(run, advert), ec.ECDSA(hashes.SHA256()))
        return Advert(advert.seal, advert.mask, _fingerprint(key.public_key()), signature)

    return sign


def known_signers(files: Iterable[Path]) -> Check:
    """Refuses a roster in which anybody is not the owner of one of these public keys."""
    keys: dict[bytes, ec.EllipticCurvePublicKey] = {}
    for file in files:
        try:
            key = serialization.load_ssh_public_key(file.read_bytes())
        except (OSError, ValueError) as error:
            raise MixflError(f"secure-peers: {file}: {error}.") from None
        if isinstance(key, ec.EllipticCurvePublicKey):
            keys[_fingerprint(key)] = key
    if not keys:
        raise MixflError("secure-peers: expected a folder with the public keys of all nodes.")

    def check(run: str, adverts: list[Advert]) -> None:
        if len({advert.who for advert in adverts}) < len(adverts):
            raise Refused("somebody is in the roster twice.")
        for advert in adverts:
            if advert.who not in keys:
                raise Refused("somebody in the roster has no key in secure-peers.")
            try:
                signed = _signed(run, advert)
                keys[advert.who].verify(advert.signature, signed, ec.ECDSA(hashes.SHA256()))
            except InvalidSignature:
                raise Refused("a signature in the roster is wrong.") from None

    return check
