"""examples/serve against an application without a framework on the same server: `make bench-serve`.

Both serve the digits' model on one processor, with uvicorn and httptools. A client on another processor keeps 8
connections busy for some seconds in turns. `serve` is the time for a request in microseconds; the rival has no checks,
no thread and no limit. AWS's sagemaker-inference is not measured: its server is a Java program.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from report import Figure, finish, make_parser, print_machine

EXAMPLE = Path(__file__).parents[1] / "examples" / "serve"
SECONDS, CONNECTIONS = 3.0, 8
BODY = json.dumps([[0.5] * 64]).encode()
REQUEST = (
    b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: " + str(len(BODY)).encode() + b"\r\n\r\n" + BODY
)
PLAIN = """
import json, os, sys
import numpy as np, torch, uvicorn
sys.path.insert(0, sys.argv[1])
import inference
torch.set_num_threads(1)
model = inference.model_fn(os.environ["SM_MODEL_DIR"])

async def application(scope, receive, send):
    body = (await receive()).get("body", b"") if scope["path"] == "/invocations" else b"[]"
    rows = json.loads(body)
    content = json.dumps(inference.predict_fn(np.asarray(rows), model)).encode() if rows else b""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": content})

uvicorn.run(application, host="127.0.0.1", port=int(sys.argv[2]), log_level="error", access_log=False, lifespan="off")
"""
SAVE = (
    "import sys, torch; sys.path.insert(0, sys.argv[1]); import inference; "
    "torch.save(inference.Net().state_dict(), sys.argv[2])"
)


def main(arguments: list[str]) -> int:
    """Measure, and print the figure."""
    options = make_parser(__doc__, 5).parse_args(arguments)
    print_machine()
    with tempfile.TemporaryDirectory() as model:
        subprocess.run([sys.executable, "-c", SAVE, EXAMPLE, f"{model}/model.pt"], check=True)
        ours, plain = find_port(), find_port()
        with (
            server(ours, model, str(EXAMPLE / "serve.py")),
            server(plain, model, "-c", PLAIN, str(EXAMPLE), str(plain)),
        ):
            os.sched_setaffinity(0, {1})
            rounds = [(load(ours), load(plain)) for _ in range(options.rounds + 1)][1:]
    times, rival = [each[0] for each in rounds], [each[1] for each in rounds]
    return finish(
        [Figure("serve", median(times), "us", rival=median(rival), rival_name="uvicorn", ceiling=1 / 0.8, rounds=times)]
    )


def find_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def server(port: int, model: str, *words: str) -> Iterator[None]:
    """A server on processor 0 that answers /ping."""
    variables = {
        "SM_MODEL_DIR": model,
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "SAGEMAKER_SUBMIT_DIRECTORY": str(EXAMPLE),
        "OMP_NUM_THREADS": "1",
    }
    command = ["taskset", "-c", "0", sys.executable, *words]
    process = subprocess.Popen(command, env={**os.environ, **variables})
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None:
                    sys.exit(f"The server ended with {process.returncode}.")
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def load(port: int) -> float:
    """Microseconds for a request, while the connections are busy."""

    async def client(until: float) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        count = 0
        while time.monotonic() < until:
            writer.write(REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                sys.exit(head.decode())
            await read_rest(reader, head)
            count += 1
        writer.close()
        return count

    async def everybody() -> int:
        until = time.monotonic() + SECONDS
        return sum(await asyncio.gather(*(client(until) for _ in range(CONNECTIONS))))

    return 1e6 * SECONDS / asyncio.run(everybody())


async def read_rest(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """The body, of a known length or in chunks."""
    lower = head.lower()
    if b"content-length:" in lower:
        return await reader.readexactly(int(lower.split(b"content-length:")[1].split(b"\r\n")[0]))
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return body


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
