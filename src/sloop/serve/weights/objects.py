"""Reads objects of S3, Google Cloud Storage and Azure with `obstore` (the extra `stores`), which finds credentials as
each cloud's users have them and renews them: the environment, roles of machines and pods, service accounts. The
profiles of `~/.aws`, which it does not know, come from boto3, if that is installed.

For S3 and stores that are compatible with it, obstore signs a URL for each request, and `WebStore` reads it. A session
token then stays in the URL: reads of obstore itself pass the header with it on when a store redirects them elsewhere.
The other clouds have their secrets in the one header that obstore drops in a redirect, so obstore reads them.
"""

import contextlib
import http.client
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import (
    BaseError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from sloop.errors import InputError
from sloop.serve.weights.sources import (
    Download,
    InterruptedTransferError,
    Patience,
    StoredFile,
    StoreError,
    Watch,
    is_strong,
)
from sloop.serve.weights.web import Answer, WebStore
from sloop.text import quoted, shortened

SIGNED_FOR: Final = timedelta(hours=1)
"""How long a signed URL may be used to begin a request."""
REQUEST_MAX: Final = timedelta(days=1)
"""For a whole request; what is longer is read on by a further one."""
REFUSAL_BYTES_MAX: Final = 4096
"""What is read of an answer that says why a store refuses."""
PROFILES: Final = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
"""The files with profiles, by the variables that name others."""
ENDPOINTS: Final = ("GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
SHARED_ACCESS: Final = ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN")
ADVICE: Final = {
    "s3": "check the URL, AWS_REGION, AWS_ENDPOINT_URL and the credentials: the variables AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, a profile (needs boto3), or a role of this machine, which may read it (s3:GetObject); "
    "AWS_SKIP_SIGNATURE=true reads public objects",
    "gs": "check the URL and the credentials: GOOGLE_APPLICATION_CREDENTIALS, or the service account of this machine, "
    "which may read it (storage.objects.get)",
    "az": "check the URL, AZURE_STORAGE_ACCOUNT_NAME and the credentials: AZURE_STORAGE_ACCOUNT_KEY, a service "
    "principal, or the identity of this machine, which may read it (Storage Blob Data Reader)",
}


def _bucket_and_key(file: StoredFile) -> tuple[str, str]:
    """StoreError for a key that obstore cannot ask for."""
    parts = urlsplit(file.location)
    key = unquote(parts.path[1:])
    if any(part in ("", ".", "..") for part in key.split("/")):
        what, advice = f"the key {quoted(key)} has an empty part, or one of dots", "give the object another key"
        raise StoreError(what, where=str(file), help=advice, status=404)
    return parts.netloc, key


@contextlib.contextmanager
def _errors(file: StoredFile) -> Iterator[None]:
    """Errors of obstore as those of a transfer. What it says may contain a signed URL."""
    advice = ADVICE[urlsplit(file.location).scheme]
    try:
        yield
    except InterruptedTransferError as error:
        raise InterruptedTransferError(f"{file}: {error}", error.error.help) from None
    except FileNotFoundError:
        raise StoreError("the store has no such file", where=str(file), help=advice, status=404) from None
    except (PermissionDeniedError, UnauthenticatedError):
        raise StoreError("the store does not permit to read it", where=str(file), help=advice, status=403) from None
    except BaseError as error:
        said = re.sub(r"\?\S*", "?…", str(error).partition("\n")[0].rpartition(" - ")[2])
        raise InterruptedTransferError(f"{file}: {shortened(said, 300)}", advice) from None


class SignedStore(WebStore):
    """Objects of S3 and of stores that are compatible with it."""

    def __init__(self) -> None:
        super().__init__()
        self._signers: dict[str, S3Store] = {}
        """By bucket; each has its credentials as long as they are valid."""

    def _url_of(self, file: StoredFile) -> str:
        bucket, key = _bucket_and_key(file)
        is_public = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
        with _errors(file):
            if bucket not in self._signers:
                given: dict[str, Any] = dict.fromkeys(("access_key_id", "secret_access_key"), "nobody")
                given = given if is_public else {"credential_provider": _profile(file)}
                retries: Any = {"max_retries": 0}
                self._signers[bucket] = S3Store(bucket, retry_config=retries, **given)
            url = str(obstore.sign(self._signers[bucket], "GET", key, SIGNED_FOR))
        return url.partition("?")[0] if is_public else url

    def _refused(self, file: StoredFile, answer: Answer, redirected: str) -> Exception:
        """The error with the code that the store gives in the body of its answer."""
        raw, status = b"", answer.status
        with contextlib.suppress(OSError, http.client.HTTPException):
            raw = answer.response.read(REFUSAL_BYTES_MAX)
        found: dict[str, str] = dict(re.findall(r"<(Code|Region)>([\x21-\x7e]{1,200}?)</", raw.decode("latin-1")))
        said = f"{status} {shortened(found.get('Code', ''))}".strip()
        if status in (408, 425, 429) or status >= 500:
            return super()._refused(file, answer, f" {shortened(found.get('Code', ''))}{redirected}")
        region = answer.headers.get("x-amz-bucket-region") or found.get("Region", "")
        what, advice = f"the store refuses it: {said}{redirected}", ADVICE["s3"]
        if region and status in (301, 307, 400):
            what += f"; the bucket is in region {quoted(region)}"
            advice = f"set AWS_REGION={shortened(region)}"
        return StoreError(what, where=str(file), help=advice, status=status)


def _profile(file: StoredFile) -> Any:  # noqa: ANN401  # of obstore's own type, which needs boto3
    """What finds the credentials of a profile of `~/.aws`; None if there is none, or if variables name a key."""
    profile = os.environ.get("AWS_PROFILE", "")
    files = (Path(os.environ.get(name) or usual).expanduser() for name, usual in PROFILES.items())
    if os.environ.get("AWS_ACCESS_KEY_ID") or not (profile or any(path.is_file() for path in files)):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415  # boto3 is not installed everywhere
    except ModuleNotFoundError:
        if not profile:
            return None  # the files may hold other settings only, and the credentials come from a role
        what = f"AWS_PROFILE names the profile {quoted(profile)}, which only boto3 can read"
        raise InputError(what, where=str(file), help="run `pip install boto3`, or unset AWS_PROFILE") from None
    try:
        return Boto3CredentialProvider()
    except ValueError:  # no credentials in any profile
        return None


class CloudStore:
    """Objects of Google Cloud Storage and of Azure."""

    def __init__(self) -> None:
        self._stores: dict[str, GCSStore | AzureStore] = {}
        """By bucket or container."""

    def open(self, file: StoredFile, watch: Watch, *, start: int = 0, version: str = "") -> Download:
        options: Any = {"range": {"offset": start}, "if_match": version} if start and is_strong(version) else None
        watch.use(None)
        with watch.asking(), _errors(file):
            store, key = self._of(file, watch.patience)
            try:
                result = obstore.get(store, key, options=options)
                is_changed = options is not None and result.meta["e_tag"] != version
            except (PreconditionError, GenericError):
                if options is None:
                    raise
                is_changed = True  # or it sends no ranges
            if is_changed:
                result, start = obstore.get(store, key), 0

        def chunks() -> Iterator[bytes]:
            stream = result.stream(min_chunk_size=1)  # each as it comes, so that slow ones are noticed
            while True:
                with watch.asking(), _errors(file):
                    chunk = next(stream, b"")
                    watch.received(len(chunk))
                if not chunk:
                    return
                yield chunk

        begin = start if options is not None else 0
        return Download(chunks(), result.meta["size"], result.meta["e_tag"] or "", begin)

    def version(self, file: StoredFile, watch: Watch, known: str) -> str:
        with watch.asking(), _errors(file):
            return obstore.head(*self._of(file, watch.patience))["e_tag"] or ""

    def _of(self, file: StoredFile, patience: Patience) -> tuple[GCSStore | AzureStore, str]:
        """The store with a file, and the file's key."""
        scheme, (bucket, key) = urlsplit(file.location).scheme, _bucket_and_key(file)
        endpoints = (os.environ.get(name, "") for name in ENDPOINTS)
        if scheme == "az" and any(map(os.environ.get, SHARED_ACCESS)):
            what = "the signature of a shared access would be sent on with a redirect"
            raise InputError(what, where=str(file), help="unset it, and name the model by https: with it in the query")
        client: Any = {
            "connect_timeout": timedelta(seconds=patience.connect_s),
            "read_timeout": timedelta(seconds=patience.stall_s),
            "timeout": REQUEST_MAX,
            "pool_max_idle_per_host": "0",
            "allow_http": any(each.startswith("http:") for each in endpoints),
        }
        retries: Any = {"max_retries": 0}  # the transfer tries again
        if bucket not in self._stores:
            made = GCSStore if scheme == "gs" else AzureStore
            self._stores[bucket] = made(bucket, client_options=client, retry_config=retries)
        return self._stores[bucket], key
