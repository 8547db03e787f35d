"""Images from hosts that the settings list, and what is never fetched."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headrace_common.callers.bounds import InputMemory, RequestInput
from headrace_common.errors import InvalidRequest, QueueFull
from headrace_common.limits import IMAGES_MAX
from headrace_frontend.openai import image_fetch
from headrace_frontend.openai.image_fetch import CONCURRENT_OF_TENANT_MAX, ImageFetcher
from headrace_frontend.openai.messages import MessageBody
from headrace_text.hugging_face import HuggingFaceCodec
from tests.image_models import image_file, write_image_model
from tests.suite.certificates import Authority
from tests.waiting import until

IMAGE = image_file()
FOUND = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(IMAGE), IMAGE)


class Host:
    """Answers each path with the same bytes. A path without an answer never gets one."""

    def __init__(self, answers: dict[str, bytes]) -> None:
        self.answers = answers
        self.heads: list[str] = []
        self.port = 0

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        answer = self.answers.get(head.split(" ")[1])
        if answer is None:
            await reader.read()
        else:
            writer.write(answer.replace(b"PORT", b"%d" % self.port))
        writer.close()


@asynccontextmanager
async def host(tls: ssl.SSLContext | None = None, **answers: bytes) -> AsyncIterator[Host]:
    found = Host({f"/{path}": answer for path, answer in answers.items()})
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0, ssl=tls)
    found.port = server.sockets[0].getsockname()[1]
    async with server:
        yield found


@pytest.fixture
def codec(tmp_path: Path) -> HuggingFaceCodec:
    return HuggingFaceCodec(write_image_model(tmp_path))


def chat(*urls: str) -> list[MessageBody]:
    content = [{"type": "image_url", "image_url": url} for url in urls]
    return [MessageBody.model_validate({"role": "user", "content": content})]


def files_of(messages: Sequence[MessageBody]) -> list[bytes]:
    parts: Any = messages[0].content
    return [part.image_url.data for part in parts]


async def refusal(hosts: Sequence[str], codec: HuggingFaceCodec, url: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await ImageFetcher(hosts).fetch(chat(url), codec, "a")
    return caught.value.violations["messages[0].content[0].image_url.url"]


async def test_images_are_fetched(codec: HuggingFaceCodec) -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
    async with host(
        a=FOUND,
        chunked=chunked % (len(IMAGE), IMAGE),
        closed=b"HTTP/1.0 200 OK\r\n\r\n" + IMAGE,
        moved=b"HTTP/1.1 302 Found\r\nlocation: /a\r\ncontent-length: 0\r\n\r\n",
        twice=b"HTTP/1.1 308 X\r\nlocation: http://127.0.0.1:PORT/moved\r\ncontent-length: 0\r\n\r\n",
    ) as there:
        paths = ("a", "chunked", "closed", "moved", "twice")
        messages = chat(*(f"http://{there.name}/{path}" for path in paths))
        await ImageFetcher((there.name,)).fetch(messages, codec, "a")
        assert files_of(messages) == [IMAGE] * 5
        assert f"\r\nhost: {there.name}\r\n" in there.heads[0]


async def test_the_certificate_of_a_host_is_checked(
    codec: HuggingFaceCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "authority")
    files = authority.sign("images")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files.tls_certificate_file, files.tls_key_file)
    async with host(tls, a=FOUND) as there:
        url = f"https://{there.name}/a"
        assert "does not accept connections" in await refusal((there.name,), codec, url)
        assert not there.heads
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        messages = chat(url)
        await ImageFetcher((there.name,)).fetch(messages, codec, "a")
        assert files_of(messages) == [IMAGE]


async def test_the_path_is_quoted(codec: HuggingFaceCodec) -> None:
    async with host() as there:
        there.answers["/a%20b%C3%A9?c=1&d=%20"] = FOUND
        messages = chat(f"http://{there.name}/a b\u00e9?c=1&d=%20#part")
        await ImageFetcher((there.name,)).fetch(messages, codec, "a")
        assert files_of(messages) == [IMAGE]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:PORT/a",
        "http://localhost:PORT/a",
        "http://user@127.0.0.1:PORT/a",
        "http://[::1]:PORT/a",
        "http://2130706433:PORT/a",
        "ftp://127.0.0.1:PORT/a",
        "http:///a",
        "http://127.0.0.1:x/a",
    ],
)
async def test_other_hosts_get_no_connection(codec: HuggingFaceCodec, url: str) -> None:
    async with host(a=FOUND) as there:
        for hosts in ((), ("images.test",), ("127.0.0.1",), ("127.0.0.1:1",)):
            await refusal(hosts, codec, url.replace("PORT", str(there.port)))
        assert not there.heads


@pytest.mark.parametrize("name", ["localhost", "127.1", "2130706433"])
async def test_a_name_without_a_public_address_gets_no_connection(
    codec: HuggingFaceCodec, name: str
) -> None:
    async with host(a=FOUND) as there:
        hosts = (f"{name}:{there.port}",)
        assert "no public address" in await refusal(hosts, codec, f"http://{hosts[0]}/a")
        assert not there.heads


async def test_a_redirect_is_checked_as_the_first_address(codec: HuggingFaceCodec) -> None:
    async with host(a=FOUND) as private:
        moved = f"HTTP/1.1 301 X\r\nlocation: http://{private.name}/a\r\n\r\n".encode()
        loop = b"HTTP/1.1 302 X\r\nlocation: /loop\r\ncontent-length: 0\r\n\r\n"
        async with host(moved=moved, loop=loop) as there:
            why = await refusal((there.name,), codec, f"http://{there.name}/moved")
            assert private.name in why
            assert not private.heads
            why = await refusal((there.name,), codec, f"http://{there.name}/loop")
            assert "more than 3 redirects" in why
            assert len(there.heads) == 5


async def test_the_connection_goes_to_the_checked_address(
    codec: HuggingFaceCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is resolved again could have another address by then."""
    async with host(a=FOUND) as there:
        lookups: list[str] = []
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo

        async def getaddrinfo(name: Any, port: Any, **options: Any) -> Any:
            if name == "images.test":
                lookups.append(name)
                return await real("127.0.0.1", port, type=options["type"])
            return await real(name, port, **options)

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(image_fetch, "_is_public", lambda address: address == "127.0.0.1")
        messages = chat(f"http://images.test:{there.port}/a")
        await ImageFetcher((f"images.test:{there.port}",)).fetch(messages, codec, "a")
        assert files_of(messages) == [IMAGE]
        assert lookups == ["images.test"]


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 302 X\r\ncontent-length: 0\r\n\r\n", "status 302"),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\nx", "encoding"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx", "could not be fetched"),
        (b"nonsense\r\n\r\n", "could not be fetched"),
        (b"", "could not be fetched"),
        (b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "fetched|status 101"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 300_000 + b"\r\n\r\n", "headers"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2_000, "more than 1000 bytes"),
    ],
)
async def test_an_answer_that_is_no_image_is_named(
    codec: HuggingFaceCodec, monkeypatch: pytest.MonkeyPatch, answer: bytes, remedy: str
) -> None:
    monkeypatch.setattr(image_fetch, "IMAGE_BYTES_MAX", 1_000)
    async with host(a=answer) as there:
        why = await refusal((there.name,), codec, f"http://{there.name}/a")
        assert any(word in why for word in remedy.split("|")), why


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 200 OK\r\n", b"x: " + b"x" * 1_000 + b"\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
        (HEAD, b"1;" + b"x" * 1_000),
        (HEAD, b"1;x=" + b"x" * 1_000 + b"\r\nx\r\n"),
        (HEAD, b"1\r\nx\r\n" * 1_000),
        (HEAD + b"1\r\nx\r\n0\r\n", b"x: " + b"x" * 1_000 + b"\r\n"),
    ],
)
async def test_an_endless_answer_ends_by_its_bytes(
    codec: HuggingFaceCodec, parts: tuple[bytes, bytes]
) -> None:
    """Of headers, interim responses, extensions, chunks or trailers."""
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        start, more = parts
        await reader.readuntil(b"\r\n\r\n")
        writer.write(start)
        with suppress(ConnectionError):
            while True:
                writer.write(more)
                await writer.drain()
                sent += len(more)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        name = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await refusal((name,), codec, f"http://{name}/a")
    # With what the system keeps of a connection.
    assert sent < 16 * 2**20


async def test_a_tenant_fetches_few_images_at_a_time(codec: HuggingFaceCodec) -> None:
    async with host(a=FOUND) as there:
        fetcher = ImageFetcher((there.name,))
        slow = [f"http://{there.name}/slow{number}" for number in range(IMAGES_MAX)]
        fetching = [asyncio.create_task(fetcher.fetch(chat(*slow), codec, "a")) for _ in range(2)]
        await until(lambda: len(there.heads) == CONCURRENT_OF_TENANT_MAX)
        messages = chat(f"http://{there.name}/a")
        await fetcher.fetch(messages, codec, "b")
        assert files_of(messages) == [IMAGE]
        assert len(there.heads) == CONCURRENT_OF_TENANT_MAX + 1
        for task in fetching:
            task.cancel()
        await asyncio.gather(*fetching, return_exceptions=True)


async def test_the_bytes_of_an_image_count_as_they_arrive(codec: HuggingFaceCodec) -> None:
    """They are what the client sends, until its request is admitted with them or refused."""
    memory = InputMemory(2**22)
    large = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % 2**20 + bytes(2**20)
    async with host(a=FOUND, large=large) as there:
        fetcher, other = ImageFetcher((there.name,)), RequestInput("b", memory)
        with RequestInput("a", memory) as sent:
            await fetcher.fetch(chat(*[f"http://{there.name}/a"] * 2), codec, "a")
            assert memory.bytes == sent.size == 2 * len(IMAGE)
        other.add(2**20)
        with pytest.raises(QueueFull), RequestInput("a", memory) as sent:
            await fetcher.fetch(chat(*[f"http://{there.name}/large"] * 4), codec, "a")
        assert memory.bytes == other.size


async def test_the_images_of_a_request_are_bounded(
    codec: HuggingFaceCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_fetch, "IMAGES_BYTES_MAX", 2 * len(IMAGE))
    monkeypatch.setattr(image_fetch, "IMAGES_MAX", 3)
    async with host(a=FOUND) as there:
        fetcher, url = ImageFetcher((there.name,)), f"http://{there.name}/a"
        await fetcher.fetch(chat(url, url), codec, "a")
        for count, remedy in ((3, "with the other images"), (4, "at most 3 images")):
            with pytest.raises(InvalidRequest, match=remedy):
                await fetcher.fetch(chat(*[url] * count), codec, "a")


async def test_a_host_that_does_not_answer_is_waited_for_within_bounds(
    codec: HuggingFaceCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is real: the socket is."""
    monkeypatch.setattr(image_fetch, "_FETCH_S", 0.1)
    async with host() as there:
        assert "within 0.1 s" in await refusal((there.name,), codec, f"http://{there.name}/a")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
        ("64:ff9b::808:808", True),
        ("::ffff:8.8.8.8", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_private_addresses_are_not_public(address: str, public: bool) -> None:
    assert image_fetch._is_public(address) is public
