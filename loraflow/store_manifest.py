"""What the store writes beside adapter files: sealed JSON documents, and the manifest of a version.

A sealed document is JSON in one canonical form with a checksum of itself inside, so any changed bit is noticed: either
the checksum differs or the form is no longer the canonical one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

__all__ = ["MANIFEST_NAME", "MAX_DOCUMENT_BYTES", "FileEntry", "Manifest", "seal", "unseal"]

MANIFEST_NAME = "manifest.json"
MAX_DOCUMENT_BYTES = 1 << 20
"""Nothing larger is read as a manifest or a ledger."""

_FORMAT = 1
_MAX_FILES = 64
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HEX = re.compile(r"[0-9a-f]{64}")
_CHECKSUM = "checksum"


def seal(body: Mapping[str, Any]) -> bytes:
    """``body`` (JSON types, no key ``checksum``) as a sealed document."""
    return _canonical({**body, _CHECKSUM: blake3(_canonical(body)).hexdigest()})


def unseal(document: bytes) -> dict[str, Any]:
    """The body of a sealed document.

    Raises:
        ValueError: It is too large, not JSON, or not what `seal` wrote.
    """
    if len(document) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"larger than {MAX_DOCUMENT_BYTES} bytes")
    try:
        body = json.loads(document)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(body, dict) or _CHECKSUM not in body:
        raise ValueError("not a sealed document")
    del body[_CHECKSUM]
    if seal(body) != document:
        raise ValueError("its checksum does not match its content")
    return body


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


@dataclass(frozen=True)
class FileEntry:
    """One file of a version: its plain name, size in bytes, and blake3 digest (64 hex digits)."""

    name: str
    size: int
    blake3: str

    def __post_init__(self) -> None:
        if not is_file_name(self.name):
            raise ValueError(f"bad file name {self.name!r}")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 0:
            raise ValueError(f"bad size {self.size!r} of {self.name}")
        if not isinstance(self.blake3, str) or not _HEX.fullmatch(self.blake3):
            raise ValueError(f"bad digest of {self.name}")


def is_file_name(name: object) -> bool:
    """Whether ``name`` is a plain file name that a version may hold: no separator, no leading dot, not the manifest."""
    return isinstance(name, str) and name != MANIFEST_NAME and _FILE_NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class Manifest:
    """What one version consists of. Written last: a version without one does not exist.

    Attributes:
        run_id: The run that wrote it.
        version: Its version; with ``run_id`` it is the policy's name.
        digest: Content digest of the snapshot (hex), as its publisher gave it.
        created: When it was written, ISO 8601, UTC.
        files: Every file, sorted by name.
    """

    run_id: str
    version: int
    digest: str
    created: str
    files: tuple[FileEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files)

    def to_bytes(self) -> bytes:
        """The sealed document."""
        return seal(
            {
                "format": _FORMAT,
                "run_id": self.run_id,
                "version": self.version,
                "digest": self.digest,
                "created": self.created,
                "files": [{"name": f.name, "size": f.size, "blake3": f.blake3} for f in self.files],
            }
        )

    @classmethod
    def parse(cls, document: bytes) -> Manifest:
        """Read a manifest that may have been written by anybody.

        Raises:
            ValueError: It is damaged, of another format, or names files that it must not.
        """
        body = unseal(document)
        if body.get("format") != _FORMAT:
            raise ValueError(f"format {body.get('format')!r}, expected {_FORMAT}")
        listed = body.get("files")
        if not isinstance(listed, list) or not 1 <= len(listed) <= _MAX_FILES:
            raise ValueError(f"it must list 1 to {_MAX_FILES} files")
        try:
            files = tuple(FileEntry(**item) for item in listed)
            manifest = cls(body["run_id"], body["version"], body["digest"], body["created"], files)
        except (TypeError, KeyError) as error:
            raise ValueError(f"a field is missing or unknown ({error})") from error
        _check_types(manifest)
        if manifest.to_bytes() != document:
            raise ValueError("a field is unknown or has the wrong type")
        return manifest


def _check_types(manifest: Manifest) -> None:
    texts: Sequence[object] = (manifest.run_id, manifest.digest, manifest.created)
    if not all(isinstance(text, str) for text in texts) or type(manifest.version) is not int or manifest.version < 0:
        raise ValueError("a field has the wrong type")
    names = [entry.name for entry in manifest.files]
    if names != sorted(set(names)):
        raise ValueError("its files are not sorted by name, or one is listed twice")
