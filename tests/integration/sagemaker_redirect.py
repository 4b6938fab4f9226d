"""Runs a script with a SageMaker SDK, and sends all its requests to AWS_ENDPOINT_URL.

    python sagemaker_redirect.py SCRIPT [ARGUMENT ...]

The SDKs name the address of some services themselves, which is stronger than the variable.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any
from urllib.parse import urlsplit

from botocore.httpsession import URLLib3Session  # type: ignore[import-untyped]

ENDPOINT = urlsplit(os.environ["AWS_ENDPOINT_URL"])
_send = URLLib3Session.send


def send(session: Any, request: Any) -> Any:
    """Sends a request to the endpoint, and ignores its address. The server finds the service in the signature."""
    request.url = urlsplit(request.url)._replace(scheme=ENDPOINT.scheme, netloc=ENDPOINT.netloc).geturl()
    return _send(session, request)


URLLib3Session.send = send
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
