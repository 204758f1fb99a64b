"""Sends drawn pictures to a served application one after the other, and says how much of their text came back.

    python examples/ocr/ask.py http://127.0.0.1:8000 --count 20

Speaks the Open Inference Protocol v2 with binary tensors, as any client of it would.
"""

import argparse
import contextlib
import http.client
import json
import sys
import time
from urllib.parse import urlsplit

import numpy as np
import pictures

READY_S = 60


def main() -> None:
    """Ask, show each answer that is not quite right, and the totals."""
    parser = argparse.ArgumentParser(description="Send drawn pictures and compare the answers with what was drawn.")
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slo-ms", type=float, help="each picture's own deadline")
    given = parser.parse_args()
    connection = connected(given.url)
    right = words = errors = characters = 0
    took_ms: list[float] = []
    for seed in range(given.seed, given.seed + given.count):
        picture = pictures.draw(seed)
        begin = time.perf_counter()
        said, meant = ask(connection, picture.pixels, given.slo_ms), "\n".join(picture.lines)
        took_ms.append(1e3 * (time.perf_counter() - begin))
        if said != meant:
            sys.stdout.write(f"picture {seed}: {said!r} for {meant!r}\n")
        found, there = pictures.words_right(said, meant)
        right, words = right + found, words + there
        errors, characters = errors + pictures.character_errors(said, meant), characters + len(meant)
    sys.stdout.write(f"{given.count} pictures: {right} of {words} words right, {errors} of {characters} signs wrong\n")
    sys.stdout.write(f"p50 {np.percentile(took_ms, 50):.0f} ms, p99 {np.percentile(took_ms, 99):.0f} ms\n")


def connected(url: str) -> http.client.HTTPConnection:
    """A connection to a server that is ready; waits for it. TimeoutError after a minute."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port or 8000, timeout=60)
    for _ in range(READY_S):
        with contextlib.suppress(ConnectionRefusedError):
            connection.request("GET", "/v2/health/ready")
            with connection.getresponse() as response:
                response.read()
                if response.status == 200:
                    return connection
        connection.close()
        time.sleep(1)
    raise TimeoutError(f"{url} did not become ready in {READY_S} s")


def ask(connection: http.client.HTTPConnection, pixels: pictures.Array, slo_ms: float | None = None) -> str:
    """The text of a picture (height, width, 3). RuntimeError where the server does not answer with one."""
    image = {"name": "image", "datatype": "UINT8", "shape": [1, *pixels.shape]}
    head = json.dumps({"inputs": [{**image, "parameters": {"binary_data_size": pixels.size}}]}).encode()
    headers = {"inference-header-content-length": str(len(head))} | ({"x-slo-ms": str(slo_ms)} if slo_ms else {})
    connection.request("POST", "/v2/models/ocr/infer", head + pixels.tobytes(), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {answer['error']}")
    if not answer["outputs"]:  # no text was found, so no line was read
        return ""
    (lines,) = answer["outputs"]
    rows = np.reshape(lines["data"], lines["shape"]).astype(np.uint8)
    return "\n".join(row.tobytes().rstrip(b"\0").decode() for row in rows)


if __name__ == "__main__":
    main()
