"""Signatures of requests, as AWS publishes them, and the account that the environment names."""

from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from urllib.parse import urlsplit

import pytest

from sloop.errors import InputError
from sloop.serve.aws import EMPTY, AwsAccount, canonical, signature

HOST = "examplebucket.s3.amazonaws.com"
STAMP = "20130524T000000Z"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
ACCOUNT = {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": SECRET}


@pytest.mark.parametrize(
    ("method", "target", "headers", "payload", "expected"),
    [
        ("GET", "/test.txt", {"range": "bytes=0-9"}, b"",
         "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"),
        ("PUT", "/test%24file.text",
         {"date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"},
         b"Welcome to Amazon S3.", "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"),
        ("GET", "/?lifecycle", {}, b"", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("GET", "/?max-keys=2&prefix=J", {}, b"", "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)  # fmt: skip
def test_examples_of_the_s3_reference(
    method: str, target: str, headers: Mapping[str, str], payload: bytes, expected: str
) -> None:
    """ "Signature Calculations for the Authorization Header", all four."""
    digest = sha256(payload).hexdigest()
    every = {**headers, "host": HOST, "x-amz-content-sha256": digest, "x-amz-date": STAMP}
    request = canonical(method, urlsplit(f"https://{HOST}{target}"), every, digest)
    assert signature(SECRET, STAMP, "us-east-1", "s3", request) == expected


def test_the_first_case_of_the_test_suite_of_signature_version_4() -> None:
    """`get-vanilla`."""
    stamp, host = "20150830T123600Z", "example.amazonaws.com"
    request = canonical("GET", urlsplit(f"https://{host}/"), {"host": host, "x-amz-date": stamp}, EMPTY)
    found = signature("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", stamp, "us-east-1", "service", request)
    assert found == "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"


def test_what_is_sent_with_a_request() -> None:
    account = AwsAccount.of(ACCOUNT)
    url = urlsplit(account.url("examplebucket", "test.txt"))
    assert url.geturl() == "https://examplebucket.s3.us-east-1.amazonaws.com/test.txt"
    found = account.signed(
        urlsplit(f"https://{HOST}/test.txt"), datetime(2013, 5, 24, tzinfo=UTC), {"range": "bytes=0-9"}
    )
    assert found == {
        "range": "bytes=0-9",
        "x-amz-content-sha256": EMPTY,
        "x-amz-date": STAMP,
        "Authorization": "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    }


@pytest.mark.parametrize(
    ("environment", "bucket", "path", "url"),
    [
        ({"AWS_REGION": "eu-west-1"}, "b-1", "a/m.onnx", "https://b-1.s3.eu-west-1.amazonaws.com/a/m.onnx"),
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, "b.1", "m.onnx", "https://s3.eu-west-1.amazonaws.com/b.1/m.onnx"),
        ({"AWS_ENDPOINT_URL": "http://h:9000/"}, "b.1", "m%20!%c3%b6.onnx", "http://h:9000/b.1/m%20%21%C3%B6.onnx"),
        ({"AWS_ENDPOINT_URL": "http://h", "AWS_ENDPOINT_URL_S3": "https://o/s3"}, "b", "m", "https://o/s3/b/m"),
    ],
)
def test_where_objects_are(environment: dict[str, str], bucket: str, path: str, url: str) -> None:
    assert AwsAccount.of(environment).url(bucket, path) == url


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"AWS_ACCESS_KEY_ID": "a"}, "AWS_SECRET_ACCESS_KEY: it is not set, but AWS_ACCESS_KEY_ID is"),
        ({"AWS_SECRET_ACCESS_KEY": "very secret"}, "AWS_ACCESS_KEY_ID: it is not set"),
        ({"AWS_REGION": "eu west"}, "AWS_REGION: 'eu west' is no region"),
        ({"AWS_ENDPOINT_URL": "minio:9000"}, "AWS_ENDPOINT_URL: it is no URL of a store"),
        ({"AWS_ENDPOINT_URL_S3": "https://me:secret@h"}, "AWS_ENDPOINT_URL_S3: it is no URL of a store"),
        ({"AWS_ENDPOINT_URL": "http://h:x"}, "it is no URL of a store"),
        ({"AWS_ENDPOINT_URL": "https://h/?a=b"}, "it is no URL of a store"),
    ],
)
def test_variables_that_are_wrong(environment: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says) as raised:
        AwsAccount.of(environment)
    assert raised.value.help
    assert "secret" not in str(raised.value)


def test_only_requests_to_the_same_store_are_signed() -> None:
    at_aws, beside = AwsAccount.of(ACCOUNT), AwsAccount.of({**ACCOUNT, "AWS_ENDPOINT_URL": "http://h:9000"})
    for url, is_at_aws, is_beside in (
        ("https://b.s3.eu-west-1.amazonaws.com/m", True, False),
        ("http://b.s3.eu-west-1.amazonaws.com/m", False, False),
        ("https://amazonaws.com.example.org/m", False, False),
        ("http://h:9000/b/m", False, True),
        ("https://h:9000/b/m", False, False),
        ("http://h/b/m", False, False),
    ):
        assert at_aws.may_sign(urlsplit(url)) == is_at_aws
        assert beside.may_sign(urlsplit(url)) == is_beside
        assert not AwsAccount.of({}).may_sign(urlsplit(url))
