"""Values that are secrets, and the places in which they are masked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from shoal_toolkit import redact

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
    """Forget the secrets before the next test."""
    yield
    redact._known.clear()


# Values that must be masked next to their names, and whether they are masked everywhere else too.
SECRETS = [
    ("AWS_ACCESS_KEY_ID", "abc123", True),
    ("AWS_SECRET_ACCESS_KEY", "/bPx/K7MDENG", True),
    ("AWS_SESSION_TOKEN", "IQoJb3JpZ2lu", True),
    ("HF_TOKEN", "swordfish", True),
    ("accessToken", "swordfish", True),
    ("TOKEN_PROD", "s3cr3t-value", True),
    ("LAST_TOKEN", "s3cr3t-value", True),
    ("WANDB_API_KEY", "abc123", True),
    ("api-key", "hunter2", True),
    ("SM_HP_API_KEY", "hunter2", True),
    ("password", "correct horse", True),
    ("DB_PASSWORD", 'a"b c', True),
    ("DB_PASSWORD", "123456789012", True),
    ("DB_PASSWORD", "12345678", False),
    ("DB_PASSWORD", "1.5", False),
    ("DB_PASSWORD", "abc", False),
    ("DB_PASSWORD", "admin", False),
    ("db_pass", "hunter2", True),
    ("DB_PWD", "hunter2", True),
    ("GOOGLE_APPLICATION_CREDENTIALS", '{"type": "x"}', True),
    ("private_key", "hunter2", True),
    ("HTTP_AUTH", "user:swordfish", True),
    ("AUTHORIZATION", "Bearer swordfish", True),
    ("AUTH_HEADER", "hunter2hunter2", True),
    ("client_secret", "hunter2", True),
    ("SHOAL_JOB_SECRET", "hunter2", True),
    ("--token", "swordfish", True),
    ("key", "hunter2hunter2", True),
    ("encryption_key", "hunter2hunter2", True),
    ("ssh_key", "hunter2hunter2", True),
]
# Values that must stay readable, next to their names and everywhere else.
FACTS = [
    ("MAX_TOKEN", "12345"),
    ("max-token", "12345"),
    ("maxToken", "12345"),
    ("MAX_TOKENS", "12345"),
    ("NUM_TOKEN", "128k"),
    ("TOKEN_LIMIT", "12345"),
    ("token_type", "bearer1234"),
    ("pad_token", "<pad>"),
    ("pad_token_id", "50256"),
    ("PAD_TOKEN", "endoftext"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("tokenizer", "gpt2-medium"),
    ("AUTH_MODE", "basic"),
    ("AUTH_TYPE", "kerberos"),
    ("use_auth_token", "True"),
    ("use_auth", "false"),
    ("HF_TOKEN", "none"),
    ("HF_TOKEN", ""),
    ("GIT_AUTHOR_NAME", "somebody"),
    ("SECRET_NAME", "prod/database"),
    ("PASSWORD_FILE", "/run/secrets/password"),
    ("SHOAL_JOB_SECRET_FILE", "/run/secrets/job"),
    ("GOOGLE_APPLICATION_CREDENTIALS", "/opt/ml/code/key.json"),
    ("private_repo", "true"),
    ("private_subnet", "subnet"),
    ("sort_key", "timestamp"),
    ("s3_key", "data/2026/part-0001"),
    ("ssh_key", "/root/.ssh/key1.pem"),
    ("AUTH_URL", "https://login1.example.com/oauth2"),
    ("label_key", "label1"),
    ("key", "name"),
    ("keys", "hunter2hunter2"),
    ("monkey", "hunter2hunter2"),
    ("PATH", "/usr/bin2:/bin"),
]


def shown(name: str, value: str) -> list[str]:
    """How a value is shown in each place where its name stands."""
    option = name if name.startswith("--") else f"--{name}"
    listed = [
        redact.mask_environment({name: value})[name],
        redact.mask_json({name: value})[name],
        redact.mask_arguments([f"{name}={value}"])[0].partition("=")[2],
    ]
    return listed + redact.mask_arguments([option, value])[1:]


@pytest.mark.parametrize(("name", "value", "everywhere"), SECRETS)
def test_what_must_be_hidden(name: str, value: str, everywhere: bool) -> None:
    assert set(shown(name, value)) == {redact.MASK}
    redact._known.clear()
    redact.learn_secrets({name: value})
    assert redact.mask_text(f"at {value} block") == f"at {redact.MASK if everywhere else value} block"


@pytest.mark.parametrize(("name", "value"), FACTS)
def test_what_must_stay_readable(name: str, value: str) -> None:
    assert set(shown(name, value)) == {value}
    assert redact.mask_text(f"env {name}={value} x") == f"env {name}={value} x"
    redact.learn_secrets({name: value})
    assert redact.mask_text(f"at step {value} block") == f"at step {value} block"


def test_the_working_directory_is_no_password() -> None:
    assert redact.mask_environment({"PWD": "/opt/ml/code1"}) == {"PWD": "/opt/ml/code1"}


def test_a_secret_of_letters_is_hidden_as_a_whole_word() -> None:
    redact.learn_secrets({"HF_TOKEN": "sword", "DB_PASSWORD": "hunter2"})
    assert redact.mask_text("swords, sword/x, my_sword and xhunter2x") == "swords, ******/x, my_sword and x******x"


@pytest.mark.parametrize("kind", TOKENS)
def test_a_token_is_known_by_its_form(kind: str) -> None:
    token = TOKENS[kind]
    masked = redact.mask_text(
        f"cannot reach https://{token}@example.com/x: 403" if "address" in kind else f"got '{token}'."
    )
    assert token not in masked
    assert redact.MASK in masked
    assert masked.endswith("@example.com/x: 403" if "address" in kind else "'.")


def test_a_private_key_is_masked_whole() -> None:
    begin, end = (f"-----{word} RSA PRIVATE KEY-----" for word in ("BEGIN", "END"))
    assert redact.mask_text(f"a\n{begin}\nMIIE\nabc\n{end}\nb") == f"a\n{redact.MASK}\nb"
    assert redact.mask_text(f"a\n{begin}\nMIIE") == f"a\n{redact.MASK}"


@pytest.mark.parametrize(
    ("text", "shown"),
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
def test_what_a_text_names_itself(text: str, shown: str) -> None:
    assert redact.mask_text(text) == shown


def test_a_known_secret_is_masked_wherever_it_turns_up() -> None:
    redact.learn_secrets({"SM_HP_PASSWORD": 'a"b c', "TOKEN": "swordfish", "SM_HPS": '{"api_key":"hunter2","n":1}'})
    assert redact.mask_text('ValueError: a"b c, swordfish/x and hunter2') == "ValueError: ******, ******/x and ******"
    assert redact.mask_text(json.dumps(['a"b c'])) == '["******"]'


@pytest.mark.parametrize(
    "long", ["a1B2" * 50_000, "\\" * 200_000, "'a': \"" * 30_000, '"token":"' * 20_000, "'token=" * 30_000]
)
def test_a_long_value_costs_linear_time(long: str) -> None:
    began = time.process_time()  # CPU time, to which a busy machine adds little: at most 0.2 s. Quadratic: minutes
    redact.learn_secrets({"SM_HPS": f'{{"token":"abcdef","x":"{long}"}}'})
    redact.mask_text(f"token {long}")
    assert time.process_time() - began < 5


def test_a_key_that_looks_random_is_masked_wherever_it_turns_up() -> None:
    redact.learn_secrets({"ENCRYPTION_KEY": "3f9a77c1", "signing-key": "b2c4d6"})
    assert redact.mask_text("ValueError: 3f9a77c1 and b2c4d6") == "ValueError: ****** and ******"


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
    assert redact.mask_arguments(argv) == shown


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
    shown = redact.mask_environment(variables)
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
    given["SHOAL_REPORTED_VARIABLES"] = "MY_TOKEN SAGEMAKER_PROGRAM MISSING"
    done = run(**given)
    assert done.out == "hunter2-hunter2\n", "the script's own output passes as it is"
    lines = [line for line in done.err.splitlines() if line.startswith("train: ")]
    assert tree.report["plan"]["variables"] == {"MY_TOKEN": "******", "SAGEMAKER_PROGRAM": "train.py"}
    explained = [run("--explain", *more, **given).out for more in ((), ("--json",))]
    json.loads(explained[1])
    shown = "\n".join([*lines, tree.failure, (tree.output / "job.json").read_text(), *explained])
    assert "ValueError: ['train.py', '--api_key', '******'" in shown
    for secret in ("hunter2", "swordfish", "correct horse", TOKENS["AWS"]):
        assert secret not in shown
