"""The pure parts of `make test-rdma`."""

from __future__ import annotations

import ast
import io
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import rdma_vm
from headrace_common.access.tokens import TokenVerifier
from rdma_vm_archive import folder_entries, write_archive
from rdma_vm_machines import EMULATION, VIRTUALIZATION, Console, Machine, command
from tests.rdma.cases import (
    BETWEEN_HOSTS,
    JOBS,
    LANES,
    RANKS,
    REQUESTS_VARIABLE,
    SEED_VARIABLE,
    VLLM,
    VLLM_CASES,
)
from tests.rdma.device import (
    Traffic,
    check_crossed_by_rdma,
    check_moved_by_rdma,
    protocol_counter,
)
from tests.rdma.report import MARK, Result, parse, write_result

RESULT = Result("serve: gqa P1 to D2", passed=True, duration_s=1.5, note='"quoted", 2 packets')


def test_a_result_is_parsed_from_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    write_result(RESULT)
    results = [parse(line) for line in capsys.readouterr().out.splitlines()]
    assert [result for result in results if result] == [RESULT]


@pytest.mark.parametrize(
    "line", ["", "booting", MARK, MARK + "{", MARK + "{}", MARK + '{"name": "a", "color": 1}']
)
def test_other_lines_are_no_results(line: str) -> None:
    assert parse(line) is None


def test_a_console_gives_whole_lines_and_keeps_everything() -> None:
    log = io.BytesIO()
    console = Console("gqa", log)
    assert console.add_output(b"one\ntw") == ["one"]
    assert console.add_output(b"o\n\xff\nthree") == ["two", "\ufffd"]
    assert log.getvalue() == b"one\ntwo\n\xff\nthree"


@pytest.mark.parametrize(
    "words,names",
    [
        ([], [job.name for job in JOBS]),
        (["--only", "two"], ["two-hosts"]),
        (["--only", "one"], [job.name for job in JOBS if len(job.roles) == 1]),
        (["--only", "mla"], ["mla"]),
        (["--only", "chaos"], ["chaos"]),
        (["--only", "vllm"], ["vllm"]),
    ],
)
def test_jobs_by_command_line(words: list[str], names: list[str]) -> None:
    assert [job.name for job in rdma_vm.parse_options(words).jobs] == names


def test_chaos_gets_the_seed_to_replay() -> None:
    words = ["--only", "chaos", "--seed", "7", "--requests", "30"]
    replayed = rdma_vm.parse_options(words)
    assert replayed.variables == {SEED_VARIABLE: "7", REQUESTS_VARIABLE: "30"}
    chosen = rdma_vm.parse_options(words[:2])
    assert chosen.variables[REQUESTS_VARIABLE] == "200"
    assert chosen.variables[SEED_VARIABLE].isdigit()


def test_every_pair_is_expected_once() -> None:
    names = [name for job in JOBS for name in job.expected_names()]
    assert max(Counter(names).values()) == 1
    for layout in ("gqa", "mla", "few-heads"):
        for prefill in RANKS:
            for decode in RANKS:
                assert f"serve: {layout} P{prefill} to D{decode}" in names
    assert {job.name for job in JOBS} >= set(LANES)
    assert all(group.between_hosts for group in BETWEEN_HOSTS)


def test_unreported_cases_have_failed() -> None:
    first, *others = JOBS[0].expected_names()
    missing = rdma_vm.missing(JOBS[0], {first: RESULT}, "time is up")
    assert [(result.name, result.passed, result.note) for result in missing] == [
        (name, False, "time is up") for name in others
    ]


def test_jobs_start_as_machines_are_free() -> None:
    two = next(job for job in JOBS if len(job.roles) == 2)
    one = next(job for job in JOBS if len(job.roles) == 1)
    assert rdma_vm.next_job([two, one], 2) is two
    assert rdma_vm.next_job([two, one], 1) is one
    assert rdma_vm.next_job([two, one], 0) is None
    assert rdma_vm.next_job([], 3) is None


def test_the_message_of_a_skipped_run_is_prominent_and_names_the_cause() -> None:
    message = rdma_vm.skip_message("missing: qemu-system-x86_64")
    assert "SKIPPED" in message
    assert "missing: qemu-system-x86_64" in message
    assert len(message.splitlines()) > 5


def test_the_machines_have_every_module_that_the_tests_import() -> None:
    files = {
        path
        for path in rdma_vm.project_files()
        if path.startswith("tests/") and path.endswith(".py")
    }
    for path in files:
        for node in ast.walk(ast.parse((rdma_vm.ROOT / path).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                imported = {f"{str(name).replace('.', '/')}.py" for name in names}
                assert imported & files, f"{path} imports {node.module}"


def test_the_machines_command() -> None:
    boot = (Path("kernel"), Path("archive"))
    alone = command(Machine("gqa", 1536, {}), boot, EMULATION, [])
    assert alone[alone.index("-net") + 1] == "none"
    assert alone[alone.index("-append") + 1].endswith("HEADRACE_RDMA_ROLE=gqa")
    told = command(Machine("chaos", 512, {"SEED": "7"}), boot, EMULATION, [])
    assert told[told.index("-append") + 1].endswith("HEADRACE_RDMA_ROLE=chaos SEED=7")
    assert told[told.index("-m") + 1] == "512"
    ends = [("52:54:00:00:00:01", 7), ("b", 8)]
    linked = command(Machine("host-1", 1536, {}), boot, VIRTUALIZATION, ends)
    assert "-net" not in linked
    assert [word for word in linked if word.startswith("socket,")] == [
        "socket,id=net0,fd=7",
        "socket,id=net1,fd=8",
    ]
    assert linked[linked.index("-cpu") + 1] == "host"


def test_folders_of_the_host_can_only_be_read() -> None:
    shares = {"packages": Path("/venv"), "model": Path("/models/one")}
    machine = Machine("vllm-host-1", 512, {}, shares)
    words = command(machine, (Path("kernel"), Path("archive")), EMULATION, [])
    assert words[words.index("-append") + 1].endswith("HEADRACE_RDMA_SHARES=packages,model")
    folders = [words[index + 1] for index, word in enumerate(words) if word == "-virtfs"]
    assert [folder.split(",")[1:3] for folder in folders] == [
        ["path=/venv", "mount_tag=packages"],
        ["path=/models/one", "mount_tag=model"],
    ]
    assert all("readonly=on" in folder for folder in folders)


def test_only_jobs_that_need_vllm_run_when_named() -> None:
    assert not any(job.needs_vllm for job in JOBS)
    assert VLLM.needs_vllm
    assert VLLM.expected_names() == VLLM_CASES


def test_an_archive_unpacks_to_the_same(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "folder" / "empty").mkdir(parents=True)
    (source / "folder" / "file").write_bytes(b"12345")
    (source / "none").write_bytes(b"")
    (source / "run").write_text("#!/bin/sh\n")
    (source / "run").chmod(0o755)
    (source / "link").symlink_to("folder/file")
    archive = io.BytesIO()
    write_archive(archive, folder_entries(source))
    unpacked = _read_archive(archive.getvalue())
    assert list(unpacked) == ["folder", "folder/empty", "folder/file", "link", "none", "run"]
    assert unpacked["folder/file"] == (0o100644, b"12345")
    assert unpacked["run"] == (0o100755, b"#!/bin/sh\n")
    assert unpacked["link"] == (0o120777, b"folder/file")
    assert unpacked["folder"][0] & 0o170000 == 0o040000


def _read_archive(data: bytes) -> dict[str, tuple[int, bytes]]:
    """Modes and contents by name, in the format of the kernel's documentation."""
    entries: dict[str, tuple[int, bytes]] = {}
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        numbers = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name_end = at + 110 + numbers[11]
        name = data[at + 110 : name_end - 1].decode()
        start = -(-name_end // 4) * 4
        if name == "TRAILER!!!":
            return entries
        entries[name] = (numbers[1], data[start : start + numbers[6]])
        at = -(-(start + numbers[6]) // 4) * 4


def test_paths_that_are_not_files_are_rejected(tmp_path: Path) -> None:
    subprocess.run(["mkfifo", tmp_path / "pipe"], check=True)
    with pytest.raises(ValueError, match="pipe"):
        write_archive(io.BytesIO(), folder_entries(tmp_path))


def test_a_counter_of_the_kernels_tables() -> None:
    text = "TcpExt: A B\nTcpExt: 1 2\nIpExt: InOctets OutOctets\nIpExt: 30 40\n"
    assert protocol_counter(text, "IpExt:", "OutOctets") == 40


def test_proof_inside_one_machine_can_fail() -> None:
    good = Traffic(rdma_packets_sent=300, ip_bytes=50_000)
    assert "300 RDMA packets" in check_moved_by_rdma(good, 1_000_000)
    with pytest.raises(AssertionError, match="cannot hold"):
        check_moved_by_rdma(Traffic(rdma_packets_sent=200, ip_bytes=50_000), 1_000_000)
    with pytest.raises(AssertionError, match="by IP"):
        check_moved_by_rdma(Traffic(rdma_packets_sent=300, ip_bytes=1_000_000), 1_000_000)


GOOD = {"rdma_packets_sent": 1000, "rdma_packets_received": 1000}


@pytest.mark.parametrize("sends", [True, False])
def test_proof_between_machines_can_fail(sends: bool) -> None:
    good = Traffic(**GOOD, roce_bytes=1_100_000, control_bytes=100_000)
    assert "1000 RDMA packets" in check_crossed_by_rdma(good, 1_000_000, sends=sends)
    counted = "rdma_packets_sent" if sends else "rdma_packets_received"
    for wrong, words in (
        (Traffic(**{**GOOD, counted: 900}, roce_bytes=1_100_000), "cannot hold"),
        (Traffic(**GOOD, roce_bytes=900_000), "device's network"),
        (Traffic(**GOOD, roce_bytes=1_100_000, control_bytes=1_000_000), "TCP's network"),
    ):
        with pytest.raises(AssertionError, match=words):
            check_crossed_by_rdma(wrong, 1_000_000, sends=sends)


def test_the_credentials_are_those_that_the_machine_names(tmp_path: Path) -> None:
    entries = dict(rdma_vm.write_credentials(tmp_path / "credentials"))
    init = (rdma_vm.ROOT / "tests/rdma/init.sh").read_text()
    start = init.index("for service in REGISTRY")
    exports = init[start : init.index("read -r up_s", start)]
    shown = subprocess.run(
        ["bash", "-euc", f"{exports}\nenv"], env={}, capture_output=True, text=True, check=True
    ).stdout
    named = dict(line.split("=", 1) for line in shown.splitlines() if "TOKEN" in line)
    assert {path.removeprefix("/") for path in named.values()} == {
        name for name in entries if "/" in name
    }
    verifier = TokenVerifier.from_pem(entries["credentials/token_keys.pem"].read_bytes())
    for role in ("registry", "router", "prefill", "decode", "operator"):
        prefix = "" if role == "operator" else f"{role.upper()}_"
        token = entries[named[f"HEADRACE_{prefix}TOKEN_FILE"].removeprefix("/")].read_text()
        assert verifier.verify(token).roles == {role}
