"""Sealed documents notice every change; manifests and ledgers refuse what they must not hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraflow.store_ledger import Entry, Ledger
from loraflow.store_manifest import FileEntry, Manifest, seal, unseal

MANIFEST = Manifest(
    "run", 3, "ab" * 32, "2026-01-02T03:04:05Z", (FileEntry("a.json", 3, "0" * 64), FileEntry("b", 0, "f" * 64))
)
LEDGER = Ledger("run", 9, {7: Entry("committed", retired=True), 8: Entry("burnt")})


def test_documents_come_back_as_they_were() -> None:
    assert Manifest.parse(MANIFEST.to_bytes()) == MANIFEST
    assert Ledger.parse(LEDGER.to_bytes()) == LEDGER
    assert MANIFEST.nbytes == 3


@pytest.mark.parametrize("document", [MANIFEST, LEDGER], ids=["manifest", "ledger"])
def test_every_single_bit_flip_and_truncation_is_noticed(document: Manifest | Ledger) -> None:
    good, parse = document.to_bytes(), type(document).parse
    for position in range(len(good)):
        flipped = bytearray(good)
        flipped[position] ^= 1 << (position % 8)
        with pytest.raises(ValueError):
            parse(bytes(flipped))
        with pytest.raises(ValueError):
            parse(good[:position])
    with pytest.raises(ValueError):
        parse(good + b"\n")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_error_and_nothing_else(document: bytes) -> None:
    for parse in (Manifest.parse, Ledger.parse):
        with pytest.raises(ValueError):
            parse(document)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["format", "run_id", "version", "digest", "created", "files"]), JSON)
def test_a_sealed_manifest_with_a_field_of_any_shape_is_read_or_refused(field: str, value: object) -> None:
    document = seal({**unseal(MANIFEST.to_bytes()), field: value})
    try:
        manifest = Manifest.parse(document)
    except ValueError:
        return
    assert manifest.to_bytes() == document


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["format", "run_id", "next_version", "versions"]), JSON)
def test_a_sealed_ledger_with_a_field_of_any_shape_is_read_or_refused(field: str, value: object) -> None:
    document = seal({**unseal(LEDGER.to_bytes()), field: value})
    try:
        ledger = Ledger.parse(document)
    except ValueError:
        return
    assert ledger.to_bytes() == document


BAD_FILES = {
    "parent": [{"name": "..", "size": 1, "blake3": "0" * 64}],
    "separator": [{"name": "a/b", "size": 1, "blake3": "0" * 64}],
    "newline": [{"name": "a\n", "size": 1, "blake3": "0" * 64}],
    "itself": [{"name": "manifest.json", "size": 1, "blake3": "0" * 64}],
    "negative": [{"name": "a", "size": -1, "blake3": "0" * 64}],
    "short digest": [{"name": "a", "size": 1, "blake3": "0" * 63}],
    "twice": [{"name": "a", "size": 1, "blake3": "0" * 64}] * 2,
    "unsorted": [{"name": n, "size": 1, "blake3": "0" * 64} for n in "ba"],
    "unknown field": [{"name": "a", "size": 1, "blake3": "0" * 64, "x": 1}],
    "none": [],
    "too many": [{"name": f"a{n:03}", "size": 1, "blake3": "0" * 64} for n in range(65)],
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_a_manifest_must_not_list(case: str) -> None:
    with pytest.raises(ValueError):
        Manifest.parse(seal({**unseal(MANIFEST.to_bytes()), "files": BAD_FILES[case]}))


def test_size_and_depth_are_bounded() -> None:
    with pytest.raises(ValueError, match="larger"):
        unseal(seal({"x": "y" * (1 << 20)}))
    with pytest.raises(ValueError):
        unseal(b"[" * 100_000)


def test_next_version_never_falls_whatever_happens() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        ledger, highest, used = Ledger("run"), 0, set()
        for _ in range(60):
            version = chance.randrange(12)
            action = chance.choice(["enter", "commit", "burn", "retire", "forget", "reconcile"])
            try:
                if action == "enter":
                    version = ledger.next_version + chance.randrange(2)
                    assert version not in used
                    used.add(version)
                    ledger = ledger.enter(version)
                elif action == "forget":
                    ledger = ledger.forget({version})
                elif action == "reconcile":
                    ledger = ledger.reconcile(chance.sample(sorted(ledger.versions), len(ledger.versions) // 2))
                else:
                    ledger = getattr(ledger, action)(version)
                    if action == "burn":
                        used.add(version)
            except ValueError:
                pass
            highest = max([highest, *(v + 1 for v in used)])
            assert ledger.next_version == highest
            ledger = Ledger.parse(ledger.to_bytes())
