"""Signs requests with AWS Signature Version 4, as S3 and the object stores that are compatible with it want them, and
says from the environment who signs.

Sources: AWS, "Signature Version 4 for API requests" (IAM user guide), "Authenticating requests (AWS Signature Version
4)" (S3 API reference), and "Environment variables" of its SDKs. Only these variables are read: no files of the AWS
command line, and no roles of machines.
"""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Final, Self
from urllib.parse import SplitResult, parse_qsl, quote, unquote_to_bytes, urlsplit

from sloop.errors import InputError
from sloop.text import quoted

KEY_ID, SECRET, TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Of two variables for the same, the first one counts."""
USUAL_REGION: Final = "us-east-1"
ALGORITHM: Final = "AWS4-HMAC-SHA256"
EMPTY: Final = sha256(b"").hexdigest()
UNRESERVED: Final = "-_.~"
DOMAIN: Final = ".amazonaws.com"


@dataclass(frozen=True, slots=True, repr=False)
class AwsAccount:
    """Who asks, and where. Without `key_id`, requests are not signed: that suffices for what everybody may read."""

    key_id: str = ""
    secret: str = ""
    token: str = ""
    """Of a session, for credentials that end."""
    region: str = USUAL_REGION
    endpoint: str = ""
    """The URL of a compatible store; empty: AWS."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """The account that the variables name. InputError for a key without its secret, and for a wrong endpoint."""
        key_id, secret = (environment.get(name, "").strip() for name in (KEY_ID, SECRET))
        if bool(key_id) != bool(secret):
            there, missing = (KEY_ID, SECRET) if key_id else (SECRET, KEY_ID)
            raise InputError(f"it is not set, but {there} is", where=missing, help="set both, or none of them")
        region = next(filter(None, (environment.get(name, "").strip() for name in REGIONS)), USUAL_REGION)
        if not re.fullmatch(r"[A-Za-z0-9-]+", region):
            raise InputError(f"{quoted(region)} is no region", where=REGIONS[0], help="write for example eu-west-1")
        name, endpoint = next(
            ((name, found) for name in ENDPOINTS if (found := environment.get(name, "").strip())), ("", "")
        )
        if endpoint:
            _check_endpoint(name, endpoint)
        return cls(key_id, secret, environment.get(TOKEN, "").strip() if key_id else "", region, endpoint.rstrip("/"))

    def url(self, bucket: str, path: str) -> str:
        """Where an object is; `path` is its key, possibly percent-encoded. The bucket is in the host name at AWS, if
        the certificate permits that, and in the path elsewhere."""
        key = quote(unquote_to_bytes(path), safe="/" + UNRESERVED)
        if self.endpoint:
            return f"{self.endpoint}/{bucket}/{key}"
        host = f"s3.{self.region}{DOMAIN}"
        return f"https://{host}/{bucket}/{key}" if "." in bucket else f"https://{bucket}.{host}/{key}"

    def may_sign(self, url: SplitResult) -> bool:
        """Whether a request to this URL, to which a store may have redirected, is signed: only at the same store."""
        if not self.key_id:
            return False
        if self.endpoint:
            own = urlsplit(self.endpoint)
            return (own.scheme, own.netloc) == (url.scheme, url.netloc)
        return url.scheme == "https" and str(url.hostname).endswith(DOMAIN)

    def signed(self, url: SplitResult, now: datetime, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of a GET of this URL at this time in UTC: these, which must be in small letters, and those that
        the signature needs. `Host` is the URL's `netloc`. Headers that are added later are not signed."""
        stamp = f"{now:%Y%m%dT%H%M%SZ}"
        found = {**headers, "x-amz-content-sha256": EMPTY, "x-amz-date": stamp}
        if self.token:
            found["x-amz-security-token"] = self.token
        request = canonical("GET", url, {**found, "host": url.netloc}, EMPTY)
        names = ";".join(sorted((*found, "host")))
        found["Authorization"] = (
            f"{ALGORITHM} Credential={self.key_id}/{_scope(stamp, self.region, 's3')}, SignedHeaders={names}, "
            f"Signature={signature(self.secret, stamp, self.region, 's3', request)}"
        )
        return found


def _check_endpoint(name: str, text: str) -> None:
    """InputError for an endpoint that is no URL of a host."""
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or "@" in parts.netloc or parts.query or parts.fragment or re.search(r"[\x00-\x20\x7f]", text):
        help = "write for example https://minio.example.org:9000"
        raise InputError("it is no URL of a store, which is http:// or https:// and a host", where=name, help=help)


def canonical(method: str, url: SplitResult, headers: Mapping[str, str], payload_sha256: str) -> str:
    """The canonical request: what is signed of a request. All `headers`, in small letters, are signed. The path is
    that of the request, percent-encoded once, as S3 wants it."""
    arguments = sorted(
        (quote(key, safe=UNRESERVED), quote(value, safe=UNRESERVED))
        for key, value in parse_qsl(url.query, keep_blank_values=True)
    )
    lines = [f"{name}:{' '.join(headers[name].split())}" for name in sorted(headers)]
    pairs = "&".join(f"{key}={value}" for key, value in arguments)
    return "\n".join([method, url.path or "/", pairs, *lines, "", ";".join(sorted(headers)), payload_sha256])


def signature(secret: str, stamp: str, region: str, service: str, request: str) -> str:
    """The signature of a canonical request. `stamp` is the time, as 20150830T123600Z."""
    key = f"AWS4{secret}".encode()
    for part in (stamp[:8], region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = "\n".join([ALGORITHM, stamp, _scope(stamp, region, service), sha256(request.encode()).hexdigest()])
    return hmac.digest(key, text.encode(), "sha256").hex()


def _scope(stamp: str, region: str, service: str) -> str:
    return f"{stamp[:8]}/{region}/{service}/aws4_request"
