"""Stores over real sockets: what they answer, and what a user is told when they answer something else."""

import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sloop.errors import InputError, MachineError, SloopError
from sloop.serve.weights.sources import (
    FolderStore,
    InterruptedTransferError,
    ModelSource,
    Patience,
    StoppedTransferError,
    Store,
    StoredFile,
    StoreError,
    Watch,
)
from sloop.serve.weights.web import WebStore
from tests.serve.bad_store import BadStore, Served

pytestmark = pytest.mark.live
SUM = "ab" * 32
QUICK = Patience(connect_s=0.5, stall_s=0.3, least_bytes_s=1000)
CONTENT = bytes(range(256)) * 1000


def read(location: str, reader: Store | None = None, start: int = 0, version: str = "", user: str = "") -> bytes:
    """All that comes of a file, while somebody looks whether it comes too slowly."""
    watch, is_over = Watch(QUICK), threading.Event()

    def look() -> None:
        while not is_over.wait(0.05):
            watch.look()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with closing(
            (reader or WebStore()).open(StoredFile(location, user), watch, start=start, version=version)
        ) as it:
            assert it.start in (0, start)
            return b"".join(it.chunks)
    finally:
        is_over.set()
        looking.join()


# Sources


@pytest.mark.parametrize(
    ("text", "location", "name"),
    [
        ("https://Host.example/a/b.onnx", "https://Host.example/a/b.onnx", "b.onnx"),
        ("HTTP://h:81/m%20x.onnx?sig=1", "http://h:81/m%20x.onnx?sig=1", "m x.onnx"),
        ("http://h/größe.onnx", "http://h/gr%C3%B6%C3%9Fe.onnx", "größe.onnx"),
        ("file:///srv/a%20b.onnx", "/srv/a b.onnx", "a b.onnx"),
        ("S3://b-1/a/m%20x.onnx", "s3://b-1/a/m%20x.onnx", "m x.onnx"),
        ("/srv/50%41.onnx", "/srv/50%41.onnx", "50%41.onnx"),
        ("/srv/a#1.onnx", "/srv/a#1.onnx", "a#1.onnx"),
        ("m.onnx", "/models/m.onnx", "m.onnx"),
    ],
)
def test_sources_are_urls_and_paths(text: str, location: str, name: str) -> None:
    for digest in ("", SUM):
        source = ModelSource.of(text + (f"#sha256={digest.upper()}" if digest else ""), Path("/models"))
        assert (source.location, source.name, source.sha256) == (location, name, digest)
        assert source.file(source.name).location == location


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ftp://h/m.onnx", "'ftp://' is no kind of store"),
        ("https:///m.onnx", "without a valid host"),
        ("https://h:99999/m.onnx", "without a valid host"),
        ("https://[::1/m.onnx", "without a valid host"),
        ("https://hö/m.onnx", "without a valid host"),
        ("https://h/models/", "does not end in the name of a file"),
        ("https://h/..", "does not end in the name of a file"),
        ("https://h/a%2Fb.onnx", "does not end in the name of a file"),
        (f"https://h/{'模' * 70}.onnx", "a file of at most 200 bytes"),
        ("https://h/a b.onnx", "a space"),
        ("https://h/m.onnx#main", "'main' is no SHA-256"),
        ("https://h/m.onnx#sha256=12", "'sha256=12' is no SHA-256"),
        ("file://host/m.onnx", "it names the host 'host'"),
        ("s3://b/", "does not end in the name of a file"),
        ("s3:///m.onnx", "without a valid host"),
        ("s3://b:9000/m.onnx", "names no bucket"),
        ("s3://Bucket/m.onnx", "names no bucket"),
        ("s3://bucket/m.onnx?versionId=1", "with a '\\?'"),
        ("/m.onnx#sha256=xyz", "'xyz' is no SHA-256"),
        ("/m\0.onnx", "no valid path|cannot read it|null"),
    ],
)
def test_sources_that_are_wrong(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as raised:
        FolderStore().open(StoredFile(ModelSource.of(text).location), Watch())
    assert raised.value.help


def test_a_folder_stands_for_the_model_in_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="0 ONNX files"):
        ModelSource.of(str(tmp_path))
    (tmp_path / "a.onnx").touch()
    assert ModelSource.of(str(tmp_path)).name == "a.onnx"
    (tmp_path / "b.onnx").touch()
    with pytest.raises(InputError, match="2 ONNX files"):
        ModelSource.of(str(tmp_path))
    (tmp_path / "model.onnx").touch()
    assert ModelSource.of(str(tmp_path)).location == str(tmp_path / "model.onnx")


def test_secrets_are_never_shown() -> None:
    source = ModelSource.of("https://me:pass%40word@h:8/m.onnx?X-Signature=abc#sha256=" + SUM)
    assert source.user == "me:pass@word"
    assert str(source) == "https://h:8/m.onnx?…" == f"{source!r}" == str(source.file("m.onnx"))
    for text in (
        "https://me:secret@h/",
        "https://me:secret@h:99999/m.onnx",
        "ftp://me:secret@h/m",
        "http://me:secret@h/m#x",
        "s3://me:secret@bucket/m.onnx",
    ):
        with pytest.raises(InputError) as raised:
            ModelSource.of(text)
        assert "secret" not in str(raised.value)


def test_files_beside_a_model_keep_the_query() -> None:
    source = ModelSource.of("https://me:x@h/models/m.onnx?sas=1")
    file = source.file("sub/w 1.bin")
    assert (file.location, file.user) == ("https://h/models/sub/w%201.bin?sas=1", "me:x")
    assert ModelSource.of("/srv/m.onnx").file("w.bin").location == "/srv/w.bin"


# Reading


def test_whole_files_and_ranges(store: BadStore) -> None:
    store.files["/m"] = served = Served(CONTENT)
    location, version = f"{store.url}/m", served.version
    assert read(location) == CONTENT
    assert read(location, start=1000, version=version) == CONTENT[1000:]
    assert read(location, start=1000, version='"older"') == CONTENT
    served.ranges = False
    assert read(location, start=1000, version=version) == CONTENT
    assert store.asked("/m")[1]["if-range"] == served.version
    assert store.asked("/m")[0]["accept-encoding"] == "identity"


def test_chunks_and_connections_that_stay_open(store: BadStore) -> None:
    store.files["/m"] = Served(CONTENT, chunked=True)
    assert read(f"{store.url}/m") == CONTENT
    store.files["/m"] = Served(CONTENT, keeps_open=True)
    assert read(f"{store.url}/m") == CONTENT
    store.files["/m"] = Served(b"")
    assert read(f"{store.url}/m") == b""


def test_versions(store: BadStore) -> None:
    reader, file, watch = WebStore(), StoredFile(f"{store.url}/m"), Watch(QUICK)
    store.files["/m"] = served = Served(CONTENT)
    known = served.version
    assert reader.version(file, watch, known) == known
    assert reader.version(file, watch, '"other"') == known
    served.content += b"!"
    assert reader.version(file, watch, known) == served.version != known
    served.etag, served.headers = "", {"Last-Modified": "Sun, 06 Nov 1994 08:49:37 GMT"}
    assert reader.version(file, watch, "") == f"W/Sun, 06 Nov 1994 08:49:37 GMT +{len(CONTENT) + 1}"
    served.headers = {}
    assert reader.version(file, watch, "") == ""


def test_only_strong_versions_are_read_on(store: BadStore) -> None:
    dated = {"Last-Modified": "Sun, 06 Nov 1994 08:49:37 GMT"}
    for served in (Served(CONTENT, etag='W/"a"'), Served(CONTENT, etag="", headers=dated), Served(CONTENT, etag="")):
        store.files["/m"] = served
        version = WebStore().version(StoredFile(f"{store.url}/m"), Watch(QUICK), "")
        assert read(f"{store.url}/m", start=9, version=version) == CONTENT
        assert "range" not in store.asked("/m")[-1]


@pytest.mark.parametrize(
    ("served", "says"),
    [
        (Served(status=404), "has no such file: 404 Said So"),
        (Served(status=410), "has no such file: 410"),
        (Served(status=401), "does not permit to read it: 401"),
        (Served(status=403), "does not permit to read it: 403"),
        (Served(status=400), "answers 400"),
        (Served(status=204), "answers 204"),
        (Served(status=301), "answers 301"),
        (Served(CONTENT, status=206), "a range that was not asked for: ''"),
        (Served(CONTENT, headers={"Content-Encoding": "gzip"}), "sends it compressed"),
        (Served(CONTENT, headers={"Content-Type": "text/html; charset=utf-8"}), "a web page"),
        (Served(raw=b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"), "announces '-5' bytes"),
        (Served(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde"), "announces '5' bytes"),
        (Served(raw=b"SSH-2.0-OpenSSH_9\r\n\r\n"), "not HTTP"),
        (Served(raw=b"HTTP/1.1 100 Continue\r\n\r\n" * 100), "not HTTP"),
        (Served(raw=b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n"), "not HTTP"),
        (Served(raw=b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n"), "not HTTP"),
    ],
)
def test_answers_that_another_try_cannot_repair(store: BadStore, served: Served, says: str) -> None:
    store.files["/m"] = served
    with pytest.raises(StoreError, match=says) as raised:
        read(f"{store.url}/m")
    assert raised.value.where == f"{store.url}/m"
    assert raised.value.help


@pytest.mark.parametrize(
    ("served", "says"),
    [
        (Served(status=503), "answers 503"),
        (Served(status=429), "answers 429"),
        (Served(raw=b""), "closed the connection before the end"),
        (Served(CONTENT, stalls=1000), "no byte has come for 0.3 s"),
        (Served(CONTENT, drip_s=0.01), "only .* bytes came in"),
        (Served(CONTENT, drip_s=0.01, chunked=True), "only .* bytes came in"),
        (Served(CONTENT, chunked=True, drops=[1000]), "before the end"),
        (Served(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcdeXX"), "before the end"),
    ],
)
def test_answers_that_break_off(store: BadStore, served: Served, says: str) -> None:
    store.files["/m"] = served
    with pytest.raises(InterruptedTransferError, match=says) as raised:
        read(f"{store.url}/m")
    assert isinstance(raised.value.error, MachineError)
    assert f"{store.url}/m" in str(raised.value.error)
    assert raised.value.error.help


def test_heads_that_drip(store: BadStore) -> None:
    """Each byte comes in time, but there is no end to them."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while not ends.wait(0.02):
                try:
                    connection.sendall(b"y")
                except OSError:
                    return

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(InterruptedTransferError, match=r"only 0 bytes came in 1\.\d+ s"):
        read(f"http://127.0.0.1:{listener.getsockname()[1]}/m")
    ends.set()
    thread.join()
    listener.close()


def test_lengths_are_checked_by_who_reads(store: BadStore) -> None:
    store.files["/m"] = Served(CONTENT, announced=len(CONTENT) + 1)
    assert len(read(f"{store.url}/m")) == len(CONTENT)  # the end comes too early
    store.files["/m"] = Served(CONTENT, beyond=b"!")
    assert len(read(f"{store.url}/m")) == len(CONTENT) + 1  # too late
    store.files["/m"] = Served(CONTENT, announced=-1)
    download = WebStore().open(StoredFile(f"{store.url}/m"), Watch(QUICK))
    download.close()
    assert download.total_bytes is None
    assert not download.has_end


@pytest.mark.parametrize(
    "given", ["bytes 1-255999/256000", "bytes 1000-1999/256000", "bytes 1000-255999/*", "none", ""]
)
def test_ranges_that_were_not_asked_for(store: BadStore, given: str) -> None:
    raw = f"HTTP/1.1 206 OK\r\nContent-Range: {given}\r\nContent-Length: 3\r\n\r\nabc".encode()
    store.files["/m"] = Served(raw=raw)
    with pytest.raises(StoreError, match="range that was not asked for"):
        read(f"{store.url}/m", start=1000, version='"a"')


def test_a_range_of_another_version_is_not_taken(store: BadStore) -> None:
    """The server ignores If-Range."""
    store.files["/m"] = Served(CONTENT, headers={"ETag": '"new"'}, etag='"old"')
    store.files["/n"] = Served(raw=b'HTTP/1.1 206 OK\r\nETag: "new"\r\nContent-Range: bytes 9-9/10\r\n\r\n!')
    with pytest.raises(StoreError, match="range"):
        read(f"{store.url}/n", start=9, version='"old"')
    assert read(f"{store.url}/m", start=9, version='"old"') == CONTENT
    assert "range" in store.asked("/m")[0]
    assert "range" not in store.asked("/m")[1]


def test_ranges_beyond_the_end_are_read_from_the_start(store: BadStore) -> None:
    store.files["/m"] = Served(raw=b"HTTP/1.1 416 No\r\n\r\n")
    with pytest.raises(StoreError, match="answers 416"):
        read(f"{store.url}/m", start=9, version='"old"')
    assert len(store.asked("/m")) == 2


# Redirects, names, connections


def test_redirects(store: BadStore) -> None:
    store.files["/m"] = Served(status=302, headers={"Location": "/n?signature=secret"})
    store.files["/n?signature=secret"] = Served(CONTENT)
    assert read(f"{store.url}/m", user="me:pw") == CONTENT
    assert [headers["authorization"] for _, headers in store.requests] == ["Basic bWU6cHc="] * 2


def test_users_are_not_sent_to_other_hosts(store: BadStore) -> None:
    with BadStore() as other:
        other.files["/n"] = Served(CONTENT)
        store.files["/m"] = Served(status=307, headers={"Location": f"http://u:p@127.0.0.1:{other.port}/n"})
        assert read(f"{store.url}/m", user="me:pw") == CONTENT
        assert "authorization" not in other.asked("/n")[0]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("/m", "redirects more than 5 times"),
        ("ftp://h/m", "no web address"),
        ("http://h:x/m", "no web address"),
        ("http://[h/m", "no web address"),
    ],
)
def test_redirects_that_lead_nowhere(store: BadStore, target: str, says: str) -> None:
    store.files["/m"] = Served(status=302, headers={"Location": target})
    with pytest.raises(StoreError, match=says):
        read(f"{store.url}/m")


def test_errors_after_a_redirect_say_where_it_led(store: BadStore) -> None:
    store.files["/m"] = Served(status=302, headers={"Location": "/gone?signature=secret"})
    with pytest.raises(StoreError, match=r"redirected to http://127.*/gone\?…\): 404") as raised:
        read(f"{store.url}/m")
    assert "secret" not in str(raised.value)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(InterruptedTransferError, match=f"no connection to 127.0.0.1:{port}: Connection refused"):
        read(f"http://127.0.0.1:{port}/m")


def test_unknown_hosts() -> None:
    with pytest.raises(InterruptedTransferError, match=r"the host 'no-such-host\.invalid' is not known"):
        read("http://no-such-host.invalid/m")
    with pytest.raises(InterruptedTransferError, match="is not known: not a valid name"):
        read(f"http://{'a' * 70}.example/m")


def test_stopped_while_it_waits(store: BadStore) -> None:
    store.files["/m"] = Served(CONTENT, stalls=1000)
    watch = Watch(Patience(stall_s=60))
    download = WebStore().open(StoredFile(f"{store.url}/m"), watch)
    threading.Timer(0.05, watch.stop).start()
    with pytest.raises(StoppedTransferError), closing(download):
        assert len(b"".join(download.chunks)) > len(CONTENT)


# TLS and tokens


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture
def secure(certificate: Path) -> Iterator[int]:
    """A port with TLS in front of a store: `/m` is a file, `/away` redirects to a URL without TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    listener = context.wrap_socket(socket.create_server(("127.0.0.1", 0)), server_side=True)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except ssl.SSLError:
                continue
            except OSError:
                return
            with connection:
                head = connection.recv(65536)
                token = next((line for line in head.split(b"\r\n") if line.startswith(b"Authorization")), b"")
                if b"/away" in head:
                    connection.sendall(
                        b"HTTP/1.1 302 Found\r\nLocation: http://localhost:1/m\r\nContent-Length: 0\r\n\r\n"
                    )
                else:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(token), token))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.close()


def test_certificates_are_checked(secure: int, certificate: Path) -> None:
    with pytest.raises(MachineError, match=r"certificate of localhost:.* is not accepted"):
        read(f"https://localhost:{secure}/m")
    trusted = WebStore(tls=ssl.create_default_context(cafile=str(certificate / "cert.pem")))
    assert read(f"https://localhost:{secure}/m", trusted) == b""
    with pytest.raises(MachineError, match="is not accepted"):
        read(f"https://127.0.0.1:{secure}/m", trusted)
    with pytest.raises(StoreError, match="redirects to http://localhost:1/m, without TLS"):
        read(f"https://localhost:{secure}/away", trusted)


def test_https_to_a_port_without_tls(store: BadStore) -> None:
    store.files["/m"] = Served(CONTENT)
    with pytest.raises((MachineError, InterruptedTransferError), match="no TLS with localhost"):
        read(f"https://localhost:{store.port}/m")


def test_tokens_go_to_their_host_only(store: BadStore, secure: int, certificate: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# private stores\n\nlocalhost:{secure} one\n127.0.0.1 X-Key: two three\nelsewhere four\n")
    tls = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    reader = WebStore(token_file=tokens, tls=tls)
    assert read(f"https://localhost:{secure}/m", reader) == b"Authorization: Bearer one"
    store.files["/m"] = Served(CONTENT)
    read(f"{store.url}/m", reader)
    assert store.asked("/m")[0]["x-key"] == "two three"
    assert "authorization" not in store.asked("/m")[0]
    tokens.write_text("nowhere.invalid one\n127.0.0.1\n")
    with pytest.raises(InputError, match=":2: no host with a token"):
        read(f"{store.url}/m", reader)
    tokens.unlink()
    with pytest.raises(InputError, match="cannot read it"):
        read(f"{store.url}/m", reader)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("Models.Example.org:8443", "https://Models.Example.org:8443/m"),
        ("models.example.org:8443", "https://MODELS.example.org:8443/m"),
        ("Models.Example.org", "https://models.example.org:8443/m"),
        ("models.example.org:443", "https://models.example.org/m"),
        ("models.example.org", "https://models.example.org:443/m"),
        ("[FD00::1]:8443", "https://[fd00::1]:8443/m"),
        ("[fd00::1]", "https://[FD00::1]/m"),
        ("fd00::1", "https://[fd00::1]:8443/m"),
    ],
)
def test_hosts_with_tokens_may_be_written_in_any_way(tmp_path: Path, host: str, url: str) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{host} secret\nmodels.example.org:9000 other\n")
    reader = WebStore(token_file=tokens)
    assert reader._authorization(urlsplit(url), "") == {"Authorization": "Bearer secret"}


def test_tokens_are_not_sent_without_tls(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("store.invalid secret\n")
    with pytest.raises(InputError, match="would be sent without TLS") as raised:
        WebStore(token_file=tokens)._authorization(urlsplit("http://store.invalid/m"), "")
    assert "secret" not in str(raised.value)


# Folders


def test_folders(tmp_path: Path) -> None:
    path, reader = tmp_path / "m", FolderStore()
    path.write_bytes(CONTENT)
    version = reader.version(StoredFile(str(path)), Watch(), "")
    assert read(str(path), reader) == CONTENT
    assert read(str(path), reader, 1000, version) == CONTENT[1000:]
    path.write_bytes(CONTENT + b"!")
    assert reader.version(StoredFile(str(path)), Watch(), version) != version
    assert read(str(path), reader, 1000, version) == CONTENT + b"!"
    for bad, says in ((tmp_path / "n", "no such file"), (tmp_path, "a folder"), (path / "x", "no such file")):
        with pytest.raises(SloopError, match=says):
            read(str(bad), reader)


def test_files_that_are_being_written(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(CONTENT)
    download = FolderStore().open(StoredFile(str(path)), Watch())
    assert next(download.chunks) == CONTENT
    os.utime(path, ns=(1, 1))
    with pytest.raises(InterruptedTransferError, match="it is being written"), closing(download):
        next(download.chunks)


def test_silence_of_the_operating_system_is_seen() -> None:
    watch = Watch()
    assert watch.silent_s == 0
    with watch.asking():
        time.sleep(0.01)
        assert watch.silent_s >= 0.01
    assert watch.silent_s == 0
