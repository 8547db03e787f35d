"""The file of contexts: private, bounded, whole."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from headrace_cli.contexts import store
from headrace_cli.contexts.store import Context, changed_contexts, contexts_path, load_contexts
from headrace_common.errors import ConfigError, NotFound

PROD = Context("10.0.0.5:7050", "10.0.0.5:7051", token_file="/secrets/token")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def add(name: str, context: Context = PROD) -> None:
    with changed_contexts() as contexts:
        contexts.add(name, context)


def test_a_context_is_kept_and_only_its_user_reads_the_file() -> None:
    assert load_contexts().by_name == {}
    add("prod")
    with changed_contexts() as contexts:
        contexts.use("prod")
    kept = load_contexts()
    assert (kept.current, kept.by_name) == ("prod", {"prod": PROD})
    path = contexts_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [one.name for one in path.parent.iterdir() if one.suffix == ".json"] == [path.name]


def test_a_file_that_others_may_change_is_refused() -> None:
    add("prod")
    contexts_path().chmod(0o620)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_contexts()


def test_the_removed_context_is_no_longer_used() -> None:
    add("prod")
    with changed_contexts() as contexts:
        contexts.use("prod")
        contexts.remove("prod")
    assert load_contexts() == store.Contexts()


def test_local_is_no_context() -> None:
    add("prod")
    with changed_contexts() as contexts:
        contexts.use("prod")
        contexts.use("local")
    assert load_contexts().current == ""
    with pytest.raises(NotFound, match="there are: local, prod"):
        load_contexts().find("staging")


def test_a_failed_change_changes_nothing() -> None:
    add("prod")

    def fail() -> None:
        with changed_contexts() as contexts:
            contexts.by_name["other"] = PROD
            contexts.use("absent")

    with pytest.raises(NotFound):
        fail()
    assert set(load_contexts().by_name) == {"prod"}


def test_the_number_of_contexts_is_bounded() -> None:
    with changed_contexts() as contexts:
        for number in range(store.CONTEXTS_MAX):
            contexts.add(f"c{number}", PROD)
        contexts.add("c0", PROD)
        with pytest.raises(ConfigError, match="256 contexts"):
            contexts.add("one-more", PROD)


@pytest.mark.parametrize("name", ["", "local", "A", "a/b", "-x", "x" * 64])
def test_wrong_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a context"):
        store.check_name(name)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        json.dumps({"contexts": {}}),
        json.dumps({"current": "x", "contexts": {}}),
        json.dumps({"current": "", "contexts": {"a": {"router": 5}}}),
        json.dumps({"current": "", "contexts": {"a": {"password": "p"}}}),
        json.dumps({"current": "", "contexts": {"a": {}}}),
        json.dumps({"current": "", "contexts": {"../a": {"router": "h:1"}}}),
        " " * (1024 * 1024) + "{}",
    ],
)
def test_a_broken_file_is_refused_in_one_line(content: str) -> None:
    path = contexts_path()
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not a file of contexts") as refused:
        load_contexts()
    assert "\n" not in refused.value.detail
