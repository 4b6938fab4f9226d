"""Serve a trained model over HTTP, as SageMaker's contract for inference has it: the program `serve` of the image.

| request | answer |
|---|---|
| `GET /ping` | 200, once the model is loaded |
| `POST /invocations` | 200 with predictions, or an error in JSON |

Input that cannot be read gets 400, and 413 if it is too long. Other types get 406 or 415. If too many requests wait,
the next one gets 429. If the model fails, the answer is 500.

`inference.py` has the functions of AWS's containers. It is in `SM_MODEL_DIR/code` or SAGEMAKER_SUBMIT_DIRECTORY, and
SAGEMAKER_PROGRAM may name another file. `model_fn(model_dir)` and `predict_fn(data, model)` are required.
`input_fn(body, content_type)` and `output_fn(prediction, accept)` have defaults for JSON and npy.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import runpy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

JSON, NPY = "application/json", "application/x-npy"
MODEL_DIR = os.environ.get("SM_MODEL_DIR", "/opt/ml/model")
WAITING = int(os.environ.get("SERVE_WAITING", "64"))
"""At most this number of requests waits; more get 429. One is computed at a time, as it may use all processors."""
BODY_BYTES = int(os.environ.get("SERVE_BODY_BYTES", str(6 << 20)))
"""The largest body. SageMaker's endpoints send at most 6 MB."""
DRAIN_SECONDS = 25  # SageMaker kills a container 30 s after SIGTERM


class BadInputError(Exception):
    """The request cannot be read: 400."""


class TypeNotSupportedError(Exception):
    """The body or the answer has another type: 415 or 406."""

    def __init__(self, status: int, given: str) -> None:
        super().__init__(f"{given!r} is not supported. Use {JSON} or {NPY}.")
        self.status = status


def read_input(body: bytes, content_type: str) -> np.ndarray[Any, Any]:
    """The default `input_fn`: an array of numbers. Pickles inside of npy are refused."""
    kind = content_type.partition(";")[0].strip() or JSON
    if kind not in (JSON, NPY):
        raise TypeNotSupportedError(415, kind)
    try:
        found = np.asarray(json.loads(body)) if kind == JSON else np.load(io.BytesIO(body), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise BadInputError(f"The body is no {kind}: {error}") from None
    if not np.issubdtype(found.dtype, np.number):
        raise BadInputError("The body is not an array of numbers. Send rows of the same length, such as [[0.5, 1.0]].")
    return found


def write_output(prediction: Any, accept: str) -> tuple[bytes, str]:
    """The default `output_fn`: the prediction, an array or anything like it, and its type."""
    kinds = [kind.partition(";")[0].strip() for kind in accept.split(",")]
    if NPY in kinds:
        packed = io.BytesIO()
        np.save(packed, np.asarray(prediction), allow_pickle=False)
        return packed.getvalue(), NPY
    if not {JSON, "application/*", "*/*", ""} & set(kinds):
        raise TypeNotSupportedError(406, accept)
    return json.dumps(np.asarray(prediction).tolist()).encode(), JSON


class Model:
    """The script's functions, the loaded model, and the thread that computes."""

    def __init__(self) -> None:
        names = runpy.run_path(str(find_script()), run_name="inference")
        missing = [name for name in ("model_fn", "predict_fn") if name not in names]
        if missing:
            raise SystemExit(f"serve: {find_script()} lacks {' and '.join(missing)}. Fix: define it.")
        self.read: Callable[[bytes, str], Any] = names.get("input_fn", read_input)
        self.predict: Callable[[Any, Any], Any] = names["predict_fn"]
        self.write: Callable[[Any, str], Any] = names.get("output_fn", write_output)
        try:
            self.model = names["model_fn"](MODEL_DIR)
        except Exception as error:
            raise SystemExit(f"serve: the model in {MODEL_DIR} cannot be loaded: {error!r}") from error
        self.waiting = 0
        self._thread = ThreadPoolExecutor(1)

    async def answer(self, body: bytes, content_type: str, accept: str) -> tuple[bytes, str]:
        """Compute in the thread, in the order of the requests."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, body, content_type, accept)

    def _answer(self, body: bytes, content_type: str, accept: str) -> tuple[bytes, str]:
        written = self.write(self.predict(self.read(body, content_type), self.model), accept)
        content, kind = written if isinstance(written, tuple) else (written, accept)
        return content.encode() if isinstance(content, str) else content, kind


def find_script() -> Path:
    """Return the script with the functions. Raise SystemExit if there is none."""
    name = os.environ.get("SAGEMAKER_PROGRAM") or "inference.py"
    places = [Path(MODEL_DIR, "code"), Path(os.environ.get("SAGEMAKER_SUBMIT_DIRECTORY", "/opt/ml/code"))]
    found = next((place / name for place in places if (place / name).is_file()), None)
    if found is None:
        raise SystemExit(f"serve: there is no {name} in {' or '.join(map(str, places))}. Fix: put it there.")
    sys.path.insert(0, str(found.parent))
    return found


async def read_body(request: Request) -> bytes:
    """Return the body, or what there is of one that is too long."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES:
            break
    return body


async def respond(model: Model, request: Request) -> Response:
    """Answer a request for predictions."""
    body, given = await read_body(request), request.headers
    if len(body) > BODY_BYTES:
        return JSONResponse({"error": f"The body has more than {BODY_BYTES} bytes."}, 413)
    try:
        content, kind = await model.answer(body, given.get("content-type", ""), given.get("accept", "*/*"))
    except BadInputError as error:
        return JSONResponse({"error": str(error)}, 400)
    except TypeNotSupportedError as error:
        return JSONResponse({"error": str(error)}, error.status)
    except Exception as error:
        print(f"serve: the model failed: {error!r}", file=sys.stderr, flush=True)
        return JSONResponse({"error": f"The model failed: {type(error).__name__}: {error}"}, 500)
    return Response(content, media_type=kind)


def application(model: Model) -> Starlette:
    """The HTTP application."""

    async def ping(_: Request) -> Response:
        return Response()

    async def invocations(request: Request) -> Response:
        if model.waiting >= WAITING:
            return JSONResponse({"error": f"{WAITING} requests wait already."}, 429, {"Retry-After": "1"})
        model.waiting += 1
        try:
            return await respond(model, request)
        finally:
            model.waiting -= 1

    return Starlette(routes=[Route("/ping", ping), Route("/invocations", invocations, methods=["POST"])])


def main() -> None:
    """Load the model, and serve until SIGTERM; requests that were begun are answered first."""
    app = application(Model())
    port = int(os.environ.get("SAGEMAKER_BIND_TO_PORT") or 8080)
    uvicorn.run(
        app, host="0.0.0.0", port=port, log_level="warning", timeout_graceful_shutdown=DRAIN_SECONDS, access_log=False
    )


if __name__ == "__main__":
    main()
