"""What is taken for a secret, and where it is masked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from shoal_toolkit.logs import redact

from .conftest import Run, Tree

# Put together here, so that nobody's scanner takes this file for a leak.
TOKENS = {
    "AWS": "AKIA" + "IOSFODNN7EXAMPLE",
    "AWS, temporary": "ASIA" + "IOSFODNN7EXAMPLE",
    "GitHub": "ghp_" + "a1B2" * 9,
    "GitHub, fine": "github_pat_" + "a1B2_" * 5,
    "GitLab": "glpat-" + "a1B2-" * 4,
    "Hugging Face": "hf_" + "aB" * 17,
    "OpenAI": "sk-" + "proj-a1B2" * 4,
    "Slack": "xoxb-" + "123456789012-abc",
    "PyPI": "pypi-" + "AgEIcHlwaS5vcmc" * 4,
    "npm": "npm_" + "a1B2" * 9,
    "Google": "AIza" + "a1B2-" * 7,
    "JWT": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0." + "dozjgNryP4J3jVmNHl0w",
    "an address": "somebody:swordfish",
}


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """What one job's secrets are is nothing to the next test."""
    yield
    redact._known.clear()


@pytest.mark.parametrize(
    "name",
    [
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "api-key"),
        *("password", "DB_PASSWORD", "db_pass", "DB_PWD", "GOOGLE_APPLICATION_CREDENTIALS", "private", "sort_key"),
        *("use_auth", "SM_HP_API_KEY", "client_secret", "--token", "key"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert redact.is_secret(name)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "max_tokens", "tokenizer", "GIT_AUTHOR_NAME", "PWD", "PATH", "monkey", "keys"]
)
def test_names_of_no_secrets(name: str) -> None:
    assert not redact.is_secret(name)


@pytest.mark.parametrize("kind", TOKENS)
def test_a_token_is_known_by_its_form(kind: str) -> None:
    token = TOKENS[kind]
    said = redact.text(f"cannot reach https://{token}@example.com/x: 403" if "address" in kind else f"got '{token}'.")
    assert token not in said
    assert redact.MASK in said
    assert said.endswith("@example.com/x: 403" if "address" in kind else "'.")


def test_a_private_key_is_masked_whole() -> None:
    begin, end = (f"-----{word} RSA PRIVATE KEY-----" for word in ("BEGIN", "END"))
    assert redact.text(f"a\n{begin}\nMIIE\nabc\n{end}\nb") == f"a\n{redact.MASK}\nb"
    assert redact.text(f"a\n{begin}\nMIIE") == f"a\n{redact.MASK}"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("env HF_TOKEN=abc123 python", "env HF_TOKEN=****** python"),
        ("-x DB_PASSWORD='a b' -x N=1", "-x DB_PASSWORD=****** -x N=1"),
        ("run.py --api-key abc --n 1", "run.py --api-key ****** --n 1"),
        ('{"api_key": "abc", "n": "1"}', '{"api_key": "******", "n": "1"}'),
        ("{'api_key': 'abc'}", "{'api_key': '******'}"),
        (r'"{\"api_key\": \"abc\", \"n\": 1}"', r'"{\"api_key\": \"******\", \"n\": 1}"'),
        ("KeyError: 'token'", "KeyError: 'token'"),
        ("ValueError: the token is too long", "ValueError: the token is too long"),
        ("sorted(rows, key=len)", "sorted(rows, key=len)"),
    ],
)
def test_what_a_text_names_itself(said: str, shown: str) -> None:
    assert redact.text(said) == shown


def test_a_known_secret_is_masked_wherever_it_turns_up() -> None:
    redact.learn({"SM_HP_PASSWORD": 'a"b c', "TOKEN": "swordfish", "SM_HPS": '{"api_key":"hunter2","n":1}'})
    assert redact.text('ValueError: a"b c, swordfish/x and hunter2') == "ValueError: ******, ******/x and ******"
    assert redact.text(json.dumps(['a"b c'])) == '["******"]'


@pytest.mark.parametrize(
    "long", ["a1B2" * 50_000, "\\" * 200_000, "'a': \"" * 30_000, '"token":"' * 20_000, "'token=" * 30_000]
)
def test_a_long_value_costs_linear_time(long: str) -> None:
    began = time.process_time()  # CPU time, to which a busy machine adds little: at most 0.2 s. Quadratic: minutes
    redact.learn({"SM_HPS": f'{{"token":"abcdef","x":"{long}"}}'})
    redact.text(f"token {long}")
    assert time.process_time() - began < 5


def test_a_key_that_looks_random_is_masked_wherever_it_turns_up() -> None:
    redact.learn({"ENCRYPTION_KEY": "3f9a77c1", "signing-key": "b2c4d6"})
    assert redact.text("ValueError: 3f9a77c1 and b2c4d6") == "ValueError: ****** and ******"


def test_what_may_be_anything_is_masked_by_its_name_alone() -> None:
    redact.learn({"use_auth_token": "True", "token": "abc", "label_key": "label", "sort_key": "timestamp"})
    assert redact.text("True: abc label timestamp") == "True: abc label timestamp"
    assert redact.arguments(["--sort_key", "timestamp"]) == ["--sort_key", "******"]


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["a.py", "--api_key", "hunter2", "--n", "1"], ["a.py", "--api_key", "******", "--n", "1"]),
        (["a.py", "--api_key=hunter2"], ["a.py", "--api_key=******"]),
        (["mpirun", "-x", "HF_TOKEN=hunter2", "-x", "PATH"], ["mpirun", "-x", "HF_TOKEN=******", "-x", "PATH"]),
        (["-x", "HF_TOKEN=hunter2 and more"], ["-x", "HF_TOKEN=******"]),
        (["sh", "-c", "python --token hunter2 x"], ["sh", "-c", "python --token ****** x"]),
    ],
)
def test_arguments(argv: list[str], shown: list[str]) -> None:
    assert redact.arguments(argv) == shown


def test_secrets_inside_the_variables_that_repeat_all_hyperparameters() -> None:
    parameters = {"sagemaker_mpi_custom_mpi_options": "-x HF_TOKEN=hunter2 -x N=1"}
    variables = {
        "SM_HP_API_KEY": "abc",
        "SM_HPS": '{"api_key":"abc","n":1,"nested":{"password":"xyz"}}',
        "SM_USER_ARGS": '["--api_key","abc","--n","1"]',
        "SM_FRAMEWORK_PARAMS": json.dumps(parameters),
        "SM_TRAINING_ENV": json.dumps({"hyperparameters": {"api_key": "abc"}, "framework": parameters}),
        "SM_CHANNELS": '["train"]',
        "EMPTY_TOKEN": "",
    }
    shown = redact.environment(variables)
    assert json.loads(shown["SM_HPS"]) == {"api_key": "******", "n": 1, "nested": {"password": "******"}}
    assert json.loads(shown["SM_USER_ARGS"]) == ["--api_key", "******", "--n", "1"]
    assert json.loads(shown["SM_FRAMEWORK_PARAMS"]) == {"sagemaker_mpi_custom_mpi_options": "-x HF_TOKEN=****** -x N=1"}
    assert not any(secret in value for value in shown.values() for secret in ("abc", "xyz", "hunter2"))
    assert (shown["SM_CHANNELS"], shown["EMPTY_TOKEN"], shown["SM_HP_API_KEY"]) == ('["train"]', "", "******")


def test_nothing_that_train_says_or_writes_has_a_secret(tree: Tree, run: Run) -> None:
    """Defect 19: the stock toolkit prints environment and hyperparameters as they are."""
    tree.script(
        "import os, sys\nprint(os.environ['SM_HP_API_KEY'])\n"
        "raise ValueError(f\"{sys.argv} {os.environ['MY_TOKEN']} {os.environ['NESTED']}\")"
    )
    tree.hyperparameters(api_key="hunter2-hunter2", nested={"password": "correct horse"})
    tree.hosts("algo-1", "algo-1")
    given = {"MY_TOKEN": "swordfish", "NESTED": TOKENS["AWS"], "SAGEMAKER_PROGRAM": "train.py"}
    done = run(**given)
    assert done.out == "hunter2-hunter2\n", "the script's own output passes as it is"
    said = [line for line in done.err.splitlines() if line.startswith("train: ")]
    explained = [run("--explain", *more, **given).out for more in ((), ("--json",))]
    json.loads(explained[1])
    shown = "\n".join([*said, tree.failure, (tree.output / "job.json").read_text(), *explained])
    assert "ValueError: ['train.py', '--api_key', '******'" in shown
    for secret in ("hunter2", "swordfish", "correct horse", TOKENS["AWS"]):
        assert secret not in shown
