"""Code from S3, and output/intermediate to S3: real boto3 against a server on loopback."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
import requests
from moto.server import ThreadedMotoServer

from shoal_toolkit.errors import ContractError
from shoal_toolkit.job import contract
from shoal_toolkit.plan import sidecars
from shoal_toolkit.sidecars import sync

from .conftest import Run, Tree, clean_environment
from .test_plan import MACHINE, planned

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "s3cret-of-the-user",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
DEAD = "http://127.0.0.1:1"
BUCKET = "bucket-of-tests"
SYNC = [sys.executable, "-m", "shoal_toolkit.sidecars.sync"]


class Bucket:
    """A bucket on a server of its own."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.variables = {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": endpoint, "AWS_REGION": "us-east-1"}
        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="x",
            aws_secret_access_key="y",
        )
        self.client.create_bucket(Bucket=BUCKET)

    def put(self, key: str, content: bytes) -> str:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)
        return f"s3://{BUCKET}/{key}"

    def contents(self) -> dict[str, bytes]:
        found = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return {item["Key"]: self.get(item["Key"]) for item in found}

    def get(self, key: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return body


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield Bucket(f"http://{host}:{port}")
    finally:
        requests.post(f"http://{host}:{port}/moto-api/reset", timeout=30)  # buckets live in this process
        server.stop()


def sourcedir(**files: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("_", "."))
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return packed.getvalue()


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


# Code


def test_an_archive_is_fetched_and_run(tree: Tree, run: Run, bucket: Bucket) -> None:
    """SM_MODULE_DIR is its address, as on AWS: published scripts save their checkpoints beside it."""
    address = bucket.put("job/source/sourcedir.tar.gz", sourcedir(train_py="import lib; lib.go()", lib_py=GO))
    tree.hyperparameters(sagemaker_submit_directory=address, sagemaker_program="train.py")
    done = run(**bucket.variables)
    assert (done.code, done.out) == (0, f"{tree.code} {address}\n"), done.err
    assert f"the code is from {address} (sagemaker_submit_directory), in {tree.code}" in done.err
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in done.err


GO = "import os\ndef go(): print(os.getcwd(), os.environ['SM_MODULE_DIR'])\n"


def test_a_single_file_is_fetched_and_run(tree: Tree, run: Run, bucket: Bucket) -> None:
    """Also a program without a #! line or suffix: S3 keeps no mode."""
    address = bucket.put("tools/run", Path("/bin/echo").read_bytes())
    done = run("hello", SAGEMAKER_SUBMIT_DIRECTORY=address, SAGEMAKER_PROGRAM="run", **bucket.variables)
    assert (done.code, done.out) == (0, "hello\n"), done.err


@pytest.mark.parametrize(
    "others",
    [
        {"AWS_ENDPOINT_URL_S3": "{live}", "S3_ENDPOINT_URL": DEAD, "AWS_ENDPOINT_URL": DEAD},
        {"S3_ENDPOINT_URL": "{live}", "AWS_ENDPOINT_URL": DEAD},
        {"AWS_ENDPOINT_URL": "{live}"},
    ],
)
def test_the_endpoint_is_the_first_that_is_named(tree: Tree, run: Run, bucket: Bucket, others: dict[str, str]) -> None:
    address = bucket.put("train.py", b"print('fetched')")
    endpoints = {name: value.format(live=bucket.endpoint) for name, value in others.items()}
    variables = {**CREDENTIALS, **endpoints, "SAGEMAKER_REGION": "eu-west-1", "SAGEMAKER_SUBMIT_DIRECTORY": address}
    assert run(SAGEMAKER_PROGRAM="train.py", **variables).out == "fetched\n"


@pytest.mark.parametrize(
    ("variables", "region"),
    [
        ({"SAGEMAKER_REGION": "eu-west-1", "AWS_REGION": "us-west-2"}, "ap-south-1"),
        ({"SAGEMAKER_REGION": "eu-west-1", "AWS_REGION": "us-west-2"}, ""),
        ({"AWS_REGION": "us-west-2"}, ""),
    ],
)
def test_the_region_is_that_of_the_job(tree: Tree, run: Run, variables: dict[str, str], region: str) -> None:
    with answering(404) as server:
        if region:
            tree.hyperparameters(sagemaker_region=region)
        run(
            SAGEMAKER_PROGRAM="train.py",
            SAGEMAKER_SUBMIT_DIRECTORY=f"s3://{BUCKET}/train.py",
            **CREDENTIALS,
            **variables,
            S3_ENDPOINT_URL=server.url,
        )
        expected = region or next(iter(variables.values()))
        assert f"/{expected}/s3/aws4_request" in server.authorizations[0]


@pytest.mark.parametrize("key", ["no-such-key.tar.gz", "../no-such-bucket/train.py"])
def test_an_object_that_is_not_there(tree: Tree, run: Run, bucket: Bucket, key: str) -> None:
    address = f"s3://{BUCKET}/{key}" if not key.startswith("../") else f"s3://{key[3:]}"
    done = run(SAGEMAKER_SUBMIT_DIRECTORY=address, SAGEMAKER_PROGRAM="train.py", **bucket.variables)
    assert done.code == 2
    assert tree.failure == (f"SAGEMAKER_SUBMIT_DIRECTORY: {address} does not exist. Fix: check the bucket and the key.")
    assert list(tree.code.iterdir()) == []


def test_an_object_that_is_no_archive(tree: Tree, run: Run, bucket: Bucket) -> None:
    address = bucket.put("code.tar.gz", b"<html>not found</html>")
    assert run(SAGEMAKER_SUBMIT_DIRECTORY=address, SAGEMAKER_PROGRAM="train.py", **bucket.variables).code == 2
    assert f"{address} is damaged or cut short: it is not a tar archive" in tree.failure


class Answering(ThreadingHTTPServer):
    """Answers everything in one way."""

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.status = status
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.authorizations: list[str] = []


class _Answer(BaseHTTPRequestHandler):
    server: Answering

    def do_HEAD(self) -> None:
        self.server.authorizations.append(self.headers["Authorization"])
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_POST = do_HEAD  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def answering(status: int) -> Iterator[Answering]:
    server = Answering(status)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_access_that_is_denied(tree: Tree, run: Run) -> None:
    address = f"s3://{BUCKET}/code.tar.gz"
    with answering(403) as server:
        variables = {**CREDENTIALS, "S3_ENDPOINT_URL": server.url, "AWS_REGION": "us-east-1"}
        done = run(SAGEMAKER_SUBMIT_DIRECTORY=address, SAGEMAKER_PROGRAM="train.py", **variables)
    assert done.code == 2
    assert f"{address}: S3 refuses with 403 (Forbidden). Fix: check that the job's role" in tree.failure
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in tree.failure + done.err


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"S3_ENDPOINT_URL": DEAD}, "EndpointConnectionError"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "NoCredentialsError"),
    ],
)
def test_a_server_that_cannot_be_asked(tree: Tree, run: Run, variables: dict[str, str], reason: str) -> None:
    address = f"s3://{BUCKET}/code.tar.gz"
    done = run(
        **{**CREDENTIALS, "AWS_REGION": "us-east-1", **variables},
        SAGEMAKER_SUBMIT_DIRECTORY=address,
        SAGEMAKER_PROGRAM="train.py",
    )
    assert done.code == 1
    assert f"{address} cannot be reached: {reason}" in tree.failure


def test_without_boto3_the_error_names_the_package_to_install(tree: Tree, run: Run, tmp_path: Path) -> None:
    (tmp_path / "boto3.py").write_text("raise ModuleNotFoundError(\"No module named 'boto3'\")")
    address = f"s3://{BUCKET}/code.tar.gz"
    done = run(SAGEMAKER_SUBMIT_DIRECTORY=address, SAGEMAKER_PROGRAM="train.py", PYTHONPATH=str(tmp_path))
    assert done.code == 1
    assert "pip install boto3" in tree.failure


def test_the_launcher_stays_small(tree: Tree, run: Run, bucket: Bucket) -> None:
    """boto3 and tarfile are in another process, which has ended."""
    script = "import os; print([l for l in open(f'/proc/{os.getppid()}/status') if l.startswith('VmHWM')][0])"
    address = bucket.put("code.tar.gz", sourcedir(train_py=script))
    done = run(SAGEMAKER_SUBMIT_DIRECTORY=address, SAGEMAKER_PROGRAM="train.py", **bucket.variables)
    assert int(done.out.split()[1]) < 20 * 1024, done.out


# output/intermediate


class Upload:
    """`python -m shoal_toolkit.sidecars.sync` on a directory."""

    def __init__(self, directory: Path, **variables: str) -> None:
        self.directory = directory
        environment = clean_environment(**{**CREDENTIALS, "AWS_REGION": "us-east-1", **variables})
        command = [*SYNC, str(directory), f"s3://{BUCKET}/prefix"]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def end(self) -> str:
        """Sends SIGTERM; returns its output."""
        until(lambda: self.directory.is_dir())  # it is past the start of Python, which a signal ends
        self.process.send_signal(signal.SIGTERM)
        _, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        return str(err)


@pytest.fixture
def upload(tmp_path: Path) -> Iterator[Callable[..., Upload]]:
    started: list[Upload] = []

    def start(**variables: str) -> Upload:
        started.append(Upload(tmp_path / "intermediate", **variables))
        until(started[-1].directory.is_dir)
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.wait()


@pytest.mark.long
def test_files_are_uploaded_while_the_script_runs_and_again_when_they_change(
    upload: Callable[..., Upload], bucket: Bucket
) -> None:
    running = upload(**bucket.variables)
    (running.directory / "deep" / "er").mkdir(parents=True)
    (running.directory / "deep" / "er" / "a b.txt").write_text("one")
    (running.directory / "link").symlink_to("deep/er/a b.txt")
    (running.directory / "gone").symlink_to("nowhere")
    os.mkfifo(running.directory / "fifo")
    until(lambda: bucket.contents() == {"prefix/deep/er/a b.txt": b"one", "prefix/link": b"one"})
    (running.directory / "deep" / "er" / "a b.txt").write_text("two, longer")
    (running.directory / "link").unlink()
    until(lambda: bucket.contents() == {"prefix/deep/er/a b.txt": b"two, longer", "prefix/link": b"one"})
    assert running.end() == ""


def test_the_last_look_takes_what_was_written_at_the_end(upload: Callable[..., Upload], bucket: Bucket) -> None:
    running = upload(**bucket.variables)
    big = os.urandom(20 << 20)  # in several parts
    (running.directory / "model.bin").write_bytes(big)
    assert running.end() == ""
    assert bucket.contents() == {"prefix/model.bin": big}


def test_the_end_of_the_launcher_is_the_end(tmp_path: Path, bucket: Bucket) -> None:
    directory = tmp_path / "intermediate"
    parent = subprocess.Popen(
        ["/bin/sh", "-c", '"$@" & echo $!; wait', "sh", *SYNC, str(directory), f"s3://{BUCKET}/prefix"],
        env=clean_environment(**bucket.variables),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    until(directory.is_dir)
    (directory / "last").write_text("words")
    parent.kill()
    parent.wait()
    until(lambda: bucket.contents() == {"prefix/last": b"words"})
    until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2])


def test_failures_are_printed_once_and_again_at_the_end(upload: Callable[..., Upload]) -> None:
    with answering(403) as server:
        running = upload(S3_ENDPOINT_URL=server.url)
        (running.directory / "a").write_text("one")
        until(lambda: len(server.authorizations) > 1)  # it tries again
        output = running.end()
    path = running.directory / "a"
    reason = f"{path} is not uploaded: s3://{BUCKET}/prefix/a: S3 refuses with 403"
    assert output.count(f"train: {reason}") == 1
    assert output.splitlines()[-1].startswith(f"train: not all of {running.directory} has been uploaded: {reason}")


def test_one_file_that_cannot_be_uploaded_stops_no_other(upload: Callable[..., Upload], bucket: Bucket) -> None:
    running = upload(**bucket.variables)
    Path(os.fsdecode(os.fsencode(running.directory) + b"/bad-\xff")).write_text("no UTF-8 name")
    (running.directory / "good").write_text("x")
    until(lambda: bucket.contents() == {"prefix/good": b"x"})
    assert "UnicodeEncodeError" in running.end()


def test_an_upload_is_given_up_when_its_file_changes(tmp_path: Path) -> None:
    """Half an old and half a new checkpoint would be worse than none."""
    path = tmp_path / "checkpoint"
    path.write_bytes(b"old" * 1000)

    class Client:
        received = b""

        def upload_fileobj(self, file: io.FileIO, *_: object, **__: object) -> None:
            received = file.read(1000)
            if self.received == b"":
                self.received = b"tried"
                path.write_bytes(b"new" * 1000)
            received += file.read()
            self.received = received

    upload = sync.Uploader(str(tmp_path), f"s3://{BUCKET}", {})
    upload._client = client = Client()
    assert upload.upload_changes(settled=False)
    assert client.received == b"tried"
    assert upload.upload_changes(settled=False)
    assert client.received == b"new" * 1000


# Under `train`


def settings(tree: Tree, output: object, **environ: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    tree.script("")
    tree.hyperparameters(sagemaker_s3_output=output, sagemaker_program="train.py")
    paths = contract.Paths(str(tree.base))
    job = contract.read_job(paths, contract.read_cluster(paths, "box"), environ, ())
    return sidecars.upload_command(job, MACHINE), tuple(sidecars.prepare_upload(job))


@pytest.mark.parametrize(
    ("output", "job", "place"),
    [
        ("s3://b/prefix", "job-1", "s3://b/prefix/job-1/output/intermediate"),
        ("s3://b/prefix/", "job-1", "s3://b/prefix/job-1/output/intermediate"),
        ("s3://b", "", "s3://b/output/intermediate"),
    ],
)
def test_the_keys_are_those_of_the_stock_toolkit(tree: Tree, output: str, job: str, place: str) -> None:
    directory = f"{tree.output}/intermediate"
    command, before = settings(tree, output, TRAINING_JOB_NAME=job)
    assert command == ("/usr/bin/python3", "-m", "shoal_toolkit.sidecars.sync", directory, place)
    assert before == (("mkdir", "-p", directory),)


@pytest.mark.parametrize("output", [None, "", "file:///tmp/output"])
def test_no_upload_without_an_s3_output(tree: Tree, output: object) -> None:
    assert settings(tree, output)[0] == ()


@pytest.mark.parametrize("output", ["/opt/ml/output", "http://b/prefix", "s3://", 5])
def test_another_place_is_refused(tree: Tree, output: object) -> None:
    with pytest.raises(ContractError, match=r"sagemaker_s3_output is .* allowed are s3://bucket/prefix"):
        settings(tree, output)


def test_train_uploads_no_directory_that_the_platform_has_made(tree: Tree) -> None:
    (tree.output / "intermediate").mkdir(parents=True)
    upload, before = settings(tree, "s3://b/prefix")
    assert upload == ()
    assert before == ()
    assert any("its upload is left to the platform" in note for note in planned(tree).notes)


def test_a_job_that_ends_at_once_has_its_files_uploaded(tree: Tree, run: Run, bucket: Bucket) -> None:
    tree.script('echo "$0" >"$SM_OUTPUT_INTERMEDIATE_DIR/note"', "go.sh")
    tree.script("raise SystemExit('a module of the job is not one of the upload')", "queue.py")
    tree.hyperparameters(sagemaker_s3_output=f"s3://{BUCKET}/out", sagemaker_program="go.sh")
    done = run(TRAINING_JOB_NAME="job-1", **bucket.variables)
    assert done.code == 0, done.err
    assert bucket.contents() == {"out/job-1/output/intermediate/note": b"./go.sh\n"}


def test_an_upload_that_fails_fails_no_job(tree: Tree, run: Run) -> None:
    tree.script('echo hello >"$SM_OUTPUT_INTERMEDIATE_DIR/note"', "go.sh")
    tree.hyperparameters(sagemaker_s3_output=f"s3://{BUCKET}/out", sagemaker_program="go.sh")
    with answering(403) as server:
        done = run(**CREDENTIALS, S3_ENDPOINT_URL=server.url, AWS_REGION="us-east-1")
    assert done.code == 0, done.err
    assert tree.outcome() == {"success"}
    assert "note is not uploaded: s3://bucket-of-tests/out/output/intermediate/note: S3 refuses with 403" in done.err
