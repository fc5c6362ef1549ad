"""Reading a version back: what it holds must be what its manifest says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from blake3 import blake3

from loraflow.errors import PublishError
from loraflow.policy import Policy
from loraflow.store_backend import Backend
from loraflow.store_guard import DAMAGED, explained, patiently
from loraflow.store_manifest import MANIFEST_NAME, MAX_DOCUMENT_BYTES, Manifest

__all__ = ["VersionReader"]


class VersionReader:
    """Reads the versions of one run.

    Args:
        backend: Where they lie.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def manifest(self, policy: Policy) -> Manifest:
        """The manifest of a version.

        Raises:
            PublishError: It is not there, damaged, or another version's.
        """
        where = self._backend.location(policy.version)
        with explained(f"read the manifest of {policy} in {self._backend.location()}"):
            document = patiently(lambda: self._backend.read(policy.version, MANIFEST_NAME, MAX_DOCUMENT_BYTES))
        try:
            manifest = Manifest.parse(document)
        except ValueError as error:
            raise PublishError(f"{where}/{MANIFEST_NAME} is damaged: {error}", hint=DAMAGED) from error
        if (manifest.run_id, manifest.version) != (policy.run_id, policy.version):
            raise PublishError(
                f"{where}/{MANIFEST_NAME} belongs to another version",
                expected=policy,
                found=Policy(manifest.run_id, manifest.version),
                hint=DAMAGED,
            )
        return manifest

    def contents(self, policy: Policy) -> Iterator[tuple[str, bytes]]:
        """Contents of a version by file name, each compared with the manifest.

        Raises:
            PublishError: A file is missing, added or changed; it is named.
        """
        version, where, manifest = policy.version, self._backend.location(policy.version), self.manifest(policy)
        with explained(f"list {where}"):
            extra = self._backend.names(version) - {MANIFEST_NAME} - {entry.name for entry in manifest.files}
        if extra:
            raise PublishError(f"{where} holds files that its manifest does not name: {sorted(extra)}")
        for entry in manifest.files:
            place = f"{where}/{entry.name}"
            with explained(f"read {place}"):
                content = patiently(partial(self._backend.read, version, entry.name, entry.size))
            if len(content) != entry.size:
                found = f"{len(content)} bytes" if len(content) < entry.size else "more"
                raise PublishError(
                    f"{place} has the wrong size", expected=f"{entry.size} bytes", found=found, hint=DAMAGED
                )
            digest = blake3(content, max_threads=blake3.AUTO).hexdigest()
            if digest != entry.blake3:
                raise PublishError(f"{place} was changed", expected=entry.blake3, found=digest, hint=DAMAGED)
            yield entry.name, content
