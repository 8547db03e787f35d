"""The names of a client's certificate over HTTP."""

from __future__ import annotations

from headrace_common.http.connection import _subject_names

ROLE = "spiffe://tests/headrace/operator"


def test_only_uris_name_a_role() -> None:
    names = (("DNS", ROLE), ("email", ROLE), ("IP Address", ROLE))
    assert _subject_names({"subjectAltName": names}) == ()
    assert _subject_names({"subjectAltName": (*names, ("URI", ROLE))}) == (ROLE.encode(),)
    assert _subject_names(None) == ()
