"""Objects of S3, Google Cloud Storage and Azure, as obstore asks real sockets for them, and what a user is told."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sloop.errors import InputError
from sloop.serve.weights import sources
from sloop.serve.weights.cache import WeightsCache
from sloop.serve.weights.objects import CloudStore, SignedStore
from sloop.serve.weights.sources import (
    InterruptedTransferError,
    ModelSource,
    Patience,
    Store,
    StoredFile,
    StoreError,
    Watch,
)
from tests.serve.bad_store import BadStore, Served, SigningStore

pytestmark = pytest.mark.live
QUICK = Patience(connect_s=0.5, stall_s=0.3, least_bytes_s=1000)
CONTENT = bytes(range(256)) * 1000


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's own clouds."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")  # no roles either


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[SigningStore]:
    with SigningStore() as made:
        setenv(monkeypatch, made.environment())
        yield made


def setenv(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def read(location: str, reader: Store | None = None, start: int = 0, version: str = "") -> bytes:
    file = StoredFile(ModelSource.of(location).location)
    with closing((reader or SignedStore()).open(file, Watch(QUICK), start=start, version=version)) as download:
        assert download.total_bytes is not None
        assert download.start in (0, start)
        return b"".join(download.chunks)


# S3


def test_objects_are_read_by_signed_urls(objects: SigningStore) -> None:
    objects.files["/models/a%20b/m%2B%281%29.onnx"] = served = Served(CONTENT)
    reader, location = SignedStore(), "s3://models/a%20b/m+(1).onnx"
    assert read(location, reader) == CONTENT
    assert read(location, reader, 1000, served.version) == CONTENT[1000:]
    assert read(location, reader, 1000, '"another"') == CONTENT
    file = StoredFile(ModelSource.of(location).location)
    assert reader.version(file, Watch(QUICK), "") == served.version
    served.content = b"new"
    assert reader.version(file, Watch(QUICK), "") == served.version


def test_objects_of_sessions_and_of_everybody(objects: SigningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    objects.files["/models/m"] = Served(CONTENT)
    objects.token = "of the session+/="
    monkeypatch.setenv("AWS_SESSION_TOKEN", objects.token)
    assert read("s3://models/m") == CONTENT
    monkeypatch.setenv("AWS_SESSION_TOKEN", "another")
    with pytest.raises(StoreError, match="400 InvalidToken"):
        read("s3://models/m")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with pytest.raises(StoreError, match="403 AccessDenied") as raised:
        read("s3://models/m")
    assert "AWS_ACCESS_KEY_ID" in str(raised.value.help)
    objects.public.add("/models/m")
    assert read("s3://models/m") == CONTENT
    assert "?" not in objects.requests[-1][0]


def test_profiles_come_from_boto3(objects: SigningStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    objects.files["/models/m"] = Served(CONTENT)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(f"[profile work]\nregion = {objects.REGION}\n")
    (tmp_path / ".aws" / "credentials").write_text(
        f"[work]\naws_access_key_id = {objects.KEY_ID}\naws_secret_access_key = {objects.SECRET}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert read("s3://models/m") == CONTENT
    monkeypatch.setitem(__import__("sys").modules, "obstore.auth.boto3", None)
    with pytest.raises(InputError, match="the profile 'work', which only boto3 can read") as raised:
        read("s3://models/m")
    assert "pip install boto3" in str(raised.value.help)


@pytest.mark.parametrize(
    ("name", "changed", "says", "advice"),
    [
        ("m", {"AWS_SECRET_ACCESS_KEY": "another"}, "403 SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        ("m", {"AWS_ACCESS_KEY_ID": "another"}, "403 InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        ("m", {"AWS_REGION": "us-east-1"},
         "400 AuthorizationQueryParametersError; the bucket is in region 'eu-test-1'", "set AWS_REGION=eu-test-1"),
        ("n", {}, "404 NoSuchKey", "check the URL"),
        ("a//m", {}, "has an empty part", "another key"),
    ],
)  # fmt: skip
def test_why_a_store_of_objects_refuses(
    objects: SigningStore,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    changed: dict[str, str],
    says: str,
    advice: str,
) -> None:
    objects.files["/models/m"] = Served(CONTENT)
    setenv(monkeypatch, changed)
    with pytest.raises(InputError, match=says) as raised:
        read(f"s3://models/{name}")
    assert advice in str(raised.value.help)
    assert objects.SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"AWS_SECRET_ACCESS_KEY": ""}, "Missing SecretAccessKey|secret"),
        ({"AWS_ENDPOINT_URL": "minio"}, "Unable to parse url"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "error sending request"),
    ],
)
def test_settings_that_lead_nowhere(
    objects: SigningStore, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], says: str
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(InterruptedTransferError, match=says) as raised:
        read("s3://models/m")
    assert "AWS_SKIP_SIGNATURE=true" in str(raised.value.error.help)


def test_a_store_of_objects_that_is_busy_is_asked_again(objects: SigningStore) -> None:
    objects.files["/models/m"] = Served(raw=b"HTTP/1.1 503 No\r\n\r\n<Error><Code>SlowDown</Code></Error>")
    with pytest.raises(InterruptedTransferError, match="the store answers 503 No SlowDown"):
        read("s3://models/m")


def test_what_signs_a_request_stays_at_its_store(objects: SigningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    objects.token = "of the session"
    monkeypatch.setenv("AWS_SESSION_TOKEN", objects.token)
    with BadStore() as other:
        other.files["/m"] = Served(CONTENT)
        objects.files["/models/m"] = Served(status=307, headers={"Location": f"{other.url}/m"})
        assert read("s3://models/m") == CONTENT
        assert "ession" not in str(other.requests)
        assert "X-Amz" not in str(other.requests)
    objects.files["/models/m"] = Served(status=307, headers={"Location": "/models/m"})
    with pytest.raises(StoreError, match="403 AccessDenied"):
        read("s3://models/m")


# Google Cloud Storage and Azure


@pytest.fixture(params=["gs", "az"])
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BadStore, str, str]]:
    """A store of one of the two, a URL there, and its path on the store."""
    with BadStore() as made:
        if request.param == "gs":
            account = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
            environment = {
                "GOOGLE_BASE_URL": made.url,
                "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({**account, "gcs_base_url": made.url}),
            }
            path = "/models/a%20b%2Fm%2Ebin"
        else:
            environment = {
                "AZURE_STORAGE_ACCOUNT_NAME": "ours",
                "AZURE_STORAGE_ACCOUNT_KEY": "a2V5",
                "AZURE_STORAGE_ENDPOINT": f"{made.url}/ours",
            }
            path = "/ours/models/a%20b/m.bin"
        setenv(monkeypatch, environment)
        yield made, f"{request.param}://models/a%20b/m.bin", path


DATED = {"Last-Modified": "Sun, 06 Nov 1994 08:49:37 GMT"}  # each of the two always says it


def test_objects_of_other_clouds(cloud: tuple[BadStore, str, str]) -> None:
    store, location, path = cloud
    store.files[path] = served = Served(CONTENT, headers=DATED)
    reader = CloudStore()
    assert read(location, reader) == CONTENT
    assert read(location, reader, 1000, served.version) == CONTENT[1000:]
    assert store.asked(path)[-1]["range"] == "bytes=1000-"
    assert read(location, reader, 1000, '"another"') == CONTENT, "the store has not looked at If-Match"
    served.ranges = False
    assert read(location, reader, 1000, served.version) == CONTENT
    file = StoredFile(ModelSource.of(location).location)
    assert reader.version(file, Watch(QUICK), "") == served.version


@pytest.mark.parametrize(
    ("served", "error", "says"),
    [
        (Served(status=404), StoreError, "no such file"),
        (Served(status=403), StoreError, "does not permit"),
        (Served(status=401), StoreError, "does not permit"),
        (Served(status=503), InterruptedTransferError, "503"),
        (Served(CONTENT, stalls=1000), InterruptedTransferError, "body error"),
        (Served(CONTENT, drops=[1000]), InterruptedTransferError, "body error"),
        (Served(CONTENT, announced=len(CONTENT) + 5), InterruptedTransferError, "body error"),
        (Served(CONTENT, announced=-1), InterruptedTransferError, "Content-Length"),
        (Served(CONTENT, drip_s=0.01), InterruptedTransferError, "only .* bytes came in"),
        (Served(status=307, headers={"Location": "/elsewhere"}), StoreError, "no such file"),
    ],
)
def test_stores_of_other_clouds_that_lie_or_fail(
    cloud: tuple[BadStore, str, str], served: Served, error: type[Exception], says: str
) -> None:
    store, location, path = cloud
    store.files[path] = replace(served, headers={**DATED, **served.headers}, drops=list(served.drops))
    with pytest.raises(error, match=says) as raised:
        read(location, CloudStore())
    assert location in str(getattr(raised.value, "error", raised.value))


def test_keys_of_other_clouds_stay_at_their_store(cloud: tuple[BadStore, str, str]) -> None:
    store, location, path = cloud
    with BadStore() as other:
        other.files["/m"] = Served(CONTENT, headers=DATED)
        store.files[path] = Served(status=307, headers={"Location": f"{other.url}/m"})
        assert read(location, CloudStore()) == CONTENT
        assert "authorization" not in other.asked("/m")[0]


def test_a_shared_access_is_named_by_https(monkeypatch: pytest.MonkeyPatch) -> None:
    setenv(monkeypatch, {"AZURE_STORAGE_ACCOUNT_NAME": "ours", "AZURE_STORAGE_SAS_KEY": "sig=secret"})
    with pytest.raises(InputError, match="shared access") as raised:
        read("az://models/m.bin", CloudStore())
    assert "secret" not in str(raised.value)


def test_without_the_extra_the_line_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:  # as `find_spec` of what is not installed
        return None

    monkeypatch.setattr(sources, "find_spec", missing)
    for scheme in sources.OBJECTS:
        with pytest.raises(InputError, match="the extra `stores`") as raised:
            ModelSource.of(f"{scheme}://models/m.onnx")
        assert "pip install obstore" in str(raised.value.help)
    assert ModelSource.of("https://models/m.onnx").name == "m.onnx"


def test_objects_are_read_on_by_the_cache(objects: SigningStore, tmp_path: Path) -> None:
    objects.files["/models/m.bin"] = Served(CONTENT, drops=[100_000])

    async def fetch() -> Path:
        cache = WeightsCache(tmp_path / "cache", 10**9, patience=Patience(pause_s=0.001))
        try:
            return await cache.fetch(ModelSource.of("s3://models/m.bin"))
        finally:
            await cache.close()

    assert asyncio.run(fetch()).read_bytes() == CONTENT
    assert [headers.get("range") for headers in objects.asked("/models/m.bin")] == [None, "bytes=100000-"]
    asyncio.run(fetch())
    assert objects.sent_bytes["/models/m.bin"] == len(CONTENT)
