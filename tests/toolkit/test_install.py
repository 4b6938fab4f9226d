"""Packages that pip installs before the launch, in a virtual environment of the test, without a network."""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
import subprocess
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import shoal_toolkit
from shoal_toolkit.job import contract
from shoal_toolkit.plan import sidecars
from shoal_toolkit.result import setup_failure
from shoal_toolkit.sidecars import install

from ..repeats import in_soak
from .conftest import Finished, Tree, clean_environment
from .test_plan import MACHINE
from .test_s3 import CREDENTIALS

OURS = (MACHINE.python, "-m", "shoal_toolkit.sidecars.install")
REQUIREMENTS = ("-r", "requirements.txt")
# A build backend in the tree needs none from an index.
BACKEND = """
import zipfile
def build_wheel(directory, config_settings=None, metadata_directory=None):
    open("left-by-the-build", "w").close()
    name = "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{directory}/{name}", "w") as wheel:
        wheel.writestr("installed/__init__.py", "")
        wheel.writestr("installed/__main__.py", "import sys; print('installed', sys.argv[1:])")
        wheel.writestr("pkg-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: pkg\\nVersion: 1.0\\n")
        wheel.writestr("pkg-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("pkg-1.0.dist-info/RECORD", "")
    return name
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def wheel(directory: Path, name: str, version: str = "1.0", needs: str = "") -> Path:
    """A package of one module, which says its name."""
    path, info = directory / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {needs}\n" if needs else ""
    )
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"{name}.py", f"NAME = {name!r}")
        packed.writestr(f"{info}/METADATA", metadata)
        packed.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{info}/RECORD", "")
    return path


class Environment:
    """A virtual environment that sees pip and boto3 of the current one, and installs into itself."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
        toolkit = Path(shoal_toolkit.__file__).parent.parent
        self.packages = next(directory.glob("lib/python*/site-packages"))
        (self.packages / "these.pth").write_text(f"{sysconfig.get_path('purelib')}\n{toolkit}\n")

    def train(self, tree: Tree, *arguments: str, **variables: str) -> Finished:
        # pip would compare the needs of all packages of the current environment, which takes a third of each test.
        pip = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_WARN_CONFLICTS": "1"}
        environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), **pip, **variables)
        command = [str(self.directory / "bin/python"), "-m", "shoal_toolkit", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        return Finished(done.returncode, done.stdout, done.stderr)

    def installed(self) -> set[str]:
        return {path.name.partition("-")[0] for path in self.packages.glob("*.dist-info")}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv")


# What is run


@pytest.mark.parametrize(
    ("files", "program", "expected"),
    [
        ({}, "train.py", ()),
        ({"requirements.txt": "x"}, "train.py", (*OURS, *REQUIREMENTS)),
        ({"requirements.txt": "x"}, "go.sh", (*OURS, *REQUIREMENTS)),
        ({"requirements.txt": "x"}, "-m pkg", (*OURS, *REQUIREMENTS)),
        ({"requirements.txt": " \n# nothing\n\n"}, "train.py", ()),
        ({"setup.py": ""}, "pkg", (*OURS, ".")),
        ({"setup.py": ""}, "-m pkg", (*OURS, ".")),
        ({"setup.py": ""}, "train.py", (*OURS, ".")),
        ({"setup.py": ""}, "go.sh", ()),
        ({"setup.py": "", "requirements.txt": "x"}, "pkg", (*OURS, ".", *REQUIREMENTS)),
        ({"setup.py": "", "requirements.txt": "x"}, "go.sh", (*OURS, *REQUIREMENTS)),
        ({"pyproject.toml": PYPROJECT}, "pkg", (*OURS, ".")),
        ({"pyproject.toml": "[project]\nname='pkg'"}, "-m pkg", (*OURS, ".")),
        ({"pyproject.toml": PYPROJECT}, "train.py", ()),
        ({"pyproject.toml": "[tool.black]"}, "-m pkg", ()),
    ],
)
@pytest.mark.parametrize("arn", ["", "arn:aws:codeartifact:eu-west-1:123456789012:repository/domain/repo"])
def test_what_is_installed(
    tree: Tree, files: dict[str, str], program: str, expected: tuple[str, ...], arn: str
) -> None:
    for name, text in {"train.py": "", "go.sh": "", **files}.items():
        tree.script(text, name)
    paths = contract.Paths(str(tree.base))
    environ = {"SAGEMAKER_PROGRAM": program, "CA_REPOSITORY_ARN": arn}
    job = contract.read_job(paths, contract.read_cluster(paths, "box"), environ, ())
    assert sidecars.install_commands(job, MACHINE) == ([expected] if expected else [])


# It is installed


@pytest.mark.parametrize("program", ["train.py", "go.sh"])
def test_requirements_are_there_when_the_script_starts(tree: Tree, environment: Environment, program: str) -> None:
    """The stock toolkit forgets them for shell scripts."""
    wheel(tree.code, "needed")
    tree.script("# of this job\n./needed-1.0-py3-none-any.whl\n", "requirements.txt")
    tree.script("import needed; print(needed.NAME)")
    tree.script(f'exec {environment.directory}/bin/python train.py "$@"', "go.sh")
    done = environment.train(tree, SAGEMAKER_PROGRAM=program, PIP_NO_INDEX="1")
    assert (done.code, done.out.splitlines()[-1]) == (0, "needed"), done.err
    assert "Successfully installed needed-1.0" in done.out + done.err
    assert environment.installed() == {"needed"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH came with Python 3.11")
def test_modules_of_the_code_do_not_hide_those_that_pip_needs(tree: Tree, environment: Environment) -> None:
    wheel(tree.code, "needed")
    tree.script("./needed-1.0-py3-none-any.whl\n", "requirements.txt")
    for name in ("json", "email", "typing", "logging", "tempfile", "platform", "calendar", "pip"):
        tree.script("raise SystemExit(__name__ + ' of the code')", f"{name}.py")
    tree.script("import needed; print(needed.NAME)")
    done = environment.train(tree, SAGEMAKER_PROGRAM="train.py", PIP_NO_INDEX="1")
    assert (done.code, done.out.splitlines()[-1]) == (0, "needed"), done.err


@pytest.mark.parametrize("metadata", ["setup.py", "pyproject.toml"])
def test_a_package_is_installed_and_run(tree: Tree, environment: Environment, metadata: str) -> None:
    tree.script(PYPROJECT, "pyproject.toml")
    tree.script("raise SystemExit('not by this')", metadata) if metadata == "setup.py" else None
    tree.script(BACKEND, "backend.py")
    tree.hyperparameters(lr=0.1, sagemaker_program="installed")
    before = sorted(path.name for path in tree.code.iterdir())
    done = environment.train(tree, PIP_NO_INDEX="1")
    assert (done.code, done.out.splitlines()[-1]) == (0, "installed ['--lr', '0.1']"), done.err
    assert environment.installed() == {"pkg"}
    assert sorted(path.name for path in tree.code.iterdir()) == before, "the build leaves nothing in the user's tree"


def test_a_failed_install_fails_the_job_with_pips_message(tree: Tree, environment: Environment) -> None:
    tree.script("no-such-package-anywhere\n", "requirements.txt")
    tree.script("print('started')")
    done = environment.train(tree, SAGEMAKER_PROGRAM="train.py", PIP_NO_INDEX="1")
    assert done.code == 1
    assert "started" not in done.out
    assert tree.failure.startswith("ERROR: Could not find a version that satisfies the requirement no-such-package")
    assert tree.outcome() == {"failure"}


# The framework stays

TORCH = metadata.version("torch")
NUMPY_MAJOR = int(metadata.version("numpy").partition(".")[0])


@pytest.mark.parametrize(
    ("asked", "wheels", "problem"),
    [
        (
            "torch==99.0",
            {"torch": ("99.0", "")},
            f"requirements.txt asks for torch==99.0, but this image has torch {TORCH}",
        ),
        (
            "wants",
            {"wants": ("1.0", "torch>=99"), "torch": ("99.0", "")},
            f"torch>=99, but this image has torch {TORCH}",
        ),
        (
            "numpy>=99",
            {"numpy": ("99.0", "")},
            f"numpy>=99, but this image has numpy {metadata.version('numpy')}, which must stay <{NUMPY_MAJOR}.",
        ),
        (
            f"numpy=={NUMPY_MAJOR}.99",  # scipy and numba need a smaller one
            {"numpy": (f"{NUMPY_MAJOR}.99", "")},
            f"numpy=={NUMPY_MAJOR}.99, but this image has numpy {metadata.version('numpy')}, which must stay",
        ),
    ],
)
def test_requirements_do_not_replace_the_framework(
    tree: Tree, environment: Environment, asked: str, wheels: dict[str, tuple[str, str]], problem: str
) -> None:
    for name, (version, needs) in wheels.items():
        wheel(tree.code, name, version, needs)
    tree.script(f"--no-index\n--find-links .\n{asked}\n", "requirements.txt")
    tree.script("print('started')")
    done = environment.train(tree, SAGEMAKER_PROGRAM="train.py")
    assert (done.code, "started" in done.out) == (1, False)
    assert problem in tree.failure.splitlines()[0]
    assert environment.installed() == set()


def test_a_package_that_is_replaced_sets_no_limit() -> None:
    """A new scipy may need a new numpy."""
    installed = install.read_installed()
    needs = install.read_needs(installed, set())
    assert re.fullmatch(rf"(>[\d.]+,)?<{NUMPY_MAJOR}\.\d+,>=[\d.]+", needs["numpy"]), needs["numpy"]
    others = set(installed) - {"torch"}
    assert install.read_needs(installed, others)["numpy"] == f"<{NUMPY_MAJOR + 1},>={NUMPY_MAJOR}"
    assert "typing-extensions" in needs, "which torch needs"
    assert "click" not in needs, "which the framework does not need"


@pytest.mark.parametrize(("framework", "fixed"), [("torch", {"numpy"}), ("tensorflow-cpu", {"numpy", "protobuf"})])
def test_a_major_version_stays_if_the_framework_is_compiled_against_it(framework: str, fixed: set[str]) -> None:
    needs = install.read_needs({framework: "2.0", "numpy": "1.26", "protobuf": "4.25"}, set())
    assert needs.keys() & {"numpy", "protobuf"} == fixed


def test_requirements_may_name_the_framework_and_replace_the_rest(tree: Tree, environment: Environment) -> None:
    wheel(tree.code, "wants", "1.0", f"numpy>={NUMPY_MAJOR}")
    wheel(tree.code, "rich", "99.0")
    asked = f"mpi4py=={metadata.version('mpi4py')}\nnumpy>={NUMPY_MAJOR}\nwants\nrich==99.0"
    tree.script(f"--no-index\n--find-links .\n{asked}", "requirements.txt")
    tree.script("print('started')")
    done = environment.train(tree, SAGEMAKER_PROGRAM="train.py")
    assert (done.code, done.out.splitlines()[-1]) == (0, "started"), done.out + done.err
    assert environment.installed() == {"wants", "rich"}


@pytest.mark.parametrize(
    ("has", "asked", "problem"),
    [
        ("tensorflow_cpu", "tensorflow", ""),
        in_soak("tensorflow_cpu", "tensorflow>=2.10,<2.15", ""),
        in_soak("tensorflow_cpu", "wants", ""),
        ("tensorflow", "tensorflow-cpu==2.14.1", ""),
        in_soak("tensorflow", "intel_tensorflow", ""),
        in_soak("tensorflow", "tf-nightly", ""),
        ("opencv_python_headless", "opencv-python", ""),
        ("tensorflow_cpu", "tensorflow==2.14.0", "asks for tensorflow==2.14.0, but this image has tensorflow 2.14.1,"),
        ("tensorflow", "tensorflow-cpu==2.14.0", "tensorflow-cpu==2.14.0, but this image has tensorflow-cpu 2.14.1,"),
        in_soak("tensorflow", "tensorflow-gpu<2", "tensorflow-gpu<2, but this image has tensorflow-gpu 2.14.1,"),
    ],
)
def test_packages_of_the_same_modules_count_as_one(
    tree: Tree, environment: Environment, has: str, asked: str, problem: str
) -> None:
    """Otherwise pip would put a build without CUDA over one with it, or the other way round."""
    info = environment.packages / f"{has}-2.14.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {has}\nVersion: 2.14.1\n")
    for name in ("tensorflow", "tensorflow_cpu", "tensorflow_gpu", "intel_tensorflow", "tf_nightly", "opencv_python"):
        for version in ("1.9", "2.14.0", "2.14.1", "2.99"):
            wheel(tree.code, name, version)
    wheel(tree.code, "wants", "1.0", "tensorflow>=2")
    tree.script(f"--no-index\n--find-links .\n{asked}\n", "requirements.txt")
    tree.script("print('started')")
    done = environment.train(tree, SAGEMAKER_PROGRAM="train.py")
    assert done.code == (1 if problem else 0), done.out + done.err
    assert problem in (tree.failure.splitlines()[0] if problem else "")
    assert environment.installed() == {has} | ({"wants"} if asked == "wants" else set())


# Why pip failed


def test_an_untrusted_certificate_is_the_cause(tree: Tree, environment: Environment, tmp_path: Path) -> None:
    tree.script("needed", "requirements.txt")
    tree.script("")
    with served_by_nobodys_authority(tmp_path) as url:
        variables = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{url}/simple", "PIP_RETRIES": "0"}
        done = environment.train(tree, SAGEMAKER_PROGRAM="train.py", **variables)
    assert done.code == 1
    head = tree.failure.splitlines()[0]
    assert head.startswith("pip does not trust the certificate of 127.0.0.1: self"), head
    assert "PIP_CERT" in head


@contextmanager
def served_by_nobodys_authority(directory: Path) -> Iterator[str]:
    """A server with a self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(timezone.utc)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False)
    pem = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / "server.pem").write_bytes(pem + key.private_bytes(*private))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.pem")
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler, bind_and_activate=True)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the client does not like the certificate
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_package_that_cannot_be_built_is_named_with_its_own_error(tree: Tree, environment: Environment) -> None:
    """pip's last line is a hint, and its first error says that metadata-generation-failed."""
    tree.script(PYPROJECT, "pyproject.toml")
    tree.script("raise RuntimeError('a compiler is missing')", "backend.py")
    tree.script("", "requirements.txt")
    tree.hyperparameters(sagemaker_program="installed")
    done = environment.train(tree, PIP_NO_INDEX="1")
    assert done.code == 1
    head = tree.failure.splitlines()[0]
    assert head.startswith("pip cannot build "), tree.failure
    assert head.endswith("RuntimeError: a compiler is missing")


RETRY = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError("
NOT_FOUND = "ERROR: Could not find a version that satisfies the requirement x (from versions: none)\n"


@pytest.mark.parametrize(
    ("printed", "head"),
    [
        (
            f"Looking in indexes: https://me:secret@index.test/simple\n{RETRY}<x>: Failed to establish a new "
            f"connection: [Errno 111] Connection refused')': /simple/x/\n{NOT_FOUND}",
            "pip cannot reach index.test: Failed to establish a new connection: [Errno 111] Connection refused. Fix: ",
        ),
        (
            "error: externally-managed-environment\n\n× This environment is externally managed\n╰─> x\n\nhint: No.\n",
            "externally-managed-environment: This environment is externally managed",
        ),
        (NOT_FOUND + "ERROR: No matching distribution found for x\n", NOT_FOUND.strip()),
        ("usage\nno such option: --x\nhint: read the manual\n", "no such option: --x"),
        (
            "The conflict is caused by:\n    The user requested a==2\n    b 1.0 depends on a<2\n\nTo fix this\n",
            "requirements.txt: these requirements conflict: requirements.txt asks for a==2 and b 1.0 depends on a<2.",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
            "pip found no space left in ",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: "
            "'/opt/venv/lib/python3.11/site-packages/x'\nCheck the permissions.\n",
            "This user cannot install packages into /opt/venv/lib/python3.11/site-packages. Fix: install them",
        ),
        (
            "  ERROR: Error [Errno 2] No such file or directory: 'git' while executing command git version\n"
            "ERROR: Cannot find command 'git' - do you have 'git' installed and in your PATH?\n",
            "requirements.txt has a git+ address, and the image has no git. Fix: require an archive instead",
        ),
        ("", ""),
    ],
)
def test_the_cause_is_read_from_what_pip_prints(printed: str, head: str) -> None:
    found = setup_failure.explain_pip_failure(printed)
    assert found.startswith(head)
    assert "secret" not in found
    assert bool(found) == bool(head)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_packages_that_cannot_be_written_fail_the_job(tree: Tree, environment: Environment) -> None:
    wheel(tree.code, "needed")
    tree.script("./needed-1.0-py3-none-any.whl", "requirements.txt")
    tree.script("print('started')")
    variables = clean_environment(
        SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py", PIP_NO_INDEX="1", HOME=str(tree.base)
    )
    read_only = f"mount --bind -o ro {environment.directory} {environment.directory}"
    train = f"{environment.directory}/bin/python -m shoal_toolkit"
    command = ["unshare", "--mount", "sh", "-c", f"{read_only} && exec {train}"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "Read-only file system" in tree.failure
    assert "started" not in done.stdout


# AWS CodeArtifact


class Index(ThreadingHTTPServer):
    """CodeArtifact's two calls, and the index that they lead to: the token is asked for."""

    def __init__(self, directory: Path, refuses: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Page)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.wheel = wheel(directory, "private")
        self.refuses = refuses
        self.asked: list[str] = []


class _Page(BaseHTTPRequestHandler):
    server: Index

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        self._answer(403 if self.server.refuses else 200, json.dumps({"authorizationToken": "t0ken"}).encode())

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        basic = base64.b64encode(b"aws:t0ken").decode()
        if self.path.startswith("/v1/repository/endpoint?"):
            self._answer(200, json.dumps({"repositoryEndpoint": f"{self.server.url}/pypi/repo/"}).encode())
        elif self.headers.get("Authorization") != f"Basic {basic}":
            self._answer(401, b"")
        elif self.path == "/pypi/repo/simple/private/":
            self._answer(200, f'<a href="/{self.server.wheel.name}">it</a>'.encode(), "text/html")
        else:
            self._answer(200, self.server.wheel.read_bytes())

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", kind)
        self.send_header("WWW-Authenticate", "Basic")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    server = Index(tmp_path)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


ARN = "arn:aws:codeartifact:eu-west-1:123456789012:repository/domain/repo"


def test_requirements_come_from_code_artifact(tree: Tree, environment: Environment, index: Index) -> None:
    tree.script("private==1.0", "requirements.txt")
    tree.script("import private; print(private.NAME)")
    variables = {**CREDENTIALS, "CA_REPOSITORY_ARN": ARN, "AWS_ENDPOINT_URL_CODEARTIFACT": index.url}
    done = environment.train(tree, SAGEMAKER_PROGRAM="train.py", PIP_NO_CACHE_DIR="1", **variables)
    assert (done.code, done.out.splitlines()[-1]) == (0, "private"), done.err + done.out
    assert index.asked[:2] == [
        "/v1/authorization-token?domain=domain&domain-owner=123456789012",
        "/v1/repository/endpoint?domain=domain&domain-owner=123456789012&repository=repo&format=pypi",
    ]
    assert "t0ken" not in done.out + done.err


def test_code_artifact_refuses(tree: Tree, environment: Environment, index: Index) -> None:
    index.refuses = True
    tree.script("private==1.0", "requirements.txt")
    tree.script("")
    variables = {**CREDENTIALS, "CA_REPOSITORY_ARN": ARN, "AWS_ENDPOINT_URL_CODEARTIFACT": index.url}
    assert environment.train(tree, SAGEMAKER_PROGRAM="train.py", **variables).code == 1
    assert tree.failure.startswith(f"ERROR: CodeArtifact refuses access to {ARN}: ")


def test_an_invalid_arn_is_an_error(tree: Tree, environment: Environment) -> None:
    tree.script("private==1.0", "requirements.txt")
    tree.script("")
    assert environment.train(tree, SAGEMAKER_PROGRAM="train.py", CA_REPOSITORY_ARN="arn:aws:s3:::b").code == 1
    assert tree.failure.startswith(
        "ERROR: The variable CA_REPOSITORY_ARN is 'arn:aws:s3:::b'. Fix: set it to arn:aws:code"
    )
