"""Each kind of entry point: its command, its variables, and that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_toolkit.errors import ContractError
from shoal_toolkit.job import code, contract
from shoal_toolkit.plan.arguments import MAX_ARGUMENT_BYTES, build_script_command, format_arguments, shorten_for_mpirun

from .conftest import Run, Tree
from .netns import UNAVAILABLE, running, two_hosts
from .test_plan import MACHINE, planned

PYTHON = MACHINE.python
FUNCTION = "import sys; from pkg.jobs import main; code = main(); sys.exit(code if type(code) is int else 0)"


def package(tree: Tree, text: str = "") -> None:
    """A package in the code directory, that needs no installation."""
    (tree.code / "pkg").mkdir()
    tree.script("", "pkg/__init__.py")
    tree.script(text, "pkg/jobs.py")


def read(tree: Tree, **environ: str) -> contract.Job:
    paths = contract.Paths(str(tree.base))
    return contract.read_job(paths, contract.read_cluster(paths, "box"), environ, ())


KINDS = [
    ("train.py", "", ["train.py"], "train"),
    ("sub/train.py", "", ["sub/train.py"], "sub/train"),
    ("a b.py", "", ["a b.py"], "a b"),
    ("-m pkg.jobs", "", ["-m", "pkg.jobs"], "pkg.jobs"),
    ("-m  pkg", "", ["-m", "pkg"], "pkg"),
]


@pytest.mark.parametrize(("name", "is_noted"), [("sub/train.py", True), ("train.py", False), ("-m sub.train", False)])
def test_requirements_beside_a_script_in_a_folder_are_not_passed_over_in_silence(
    tree: Tree, name: str, is_noted: bool
) -> None:
    (tree.code / "sub").mkdir()
    for file in ("train.py", "sub/train.py", "sub/requirements.txt"):
        tree.script("numpy", file)
    notes = planned(tree, SAGEMAKER_PROGRAM=name).notes
    assert any(note.startswith("sub/requirements.txt is not installed. Fix: ") for note in notes) == is_noted


@pytest.mark.parametrize("mpi4py", [False, True])
@pytest.mark.parametrize(("name", "text", "words", "module"), KINDS)
def test_python_is_run_by_python(tree: Tree, name: str, text: str, words: list[str], module: str, mpi4py: bool) -> None:
    package(tree)
    (tree.code / "sub").mkdir()
    if name.endswith(".py"):
        tree.script(text, name)
    job = read(tree, SAGEMAKER_PROGRAM=name)
    front = [PYTHON, "-m", "mpi4py"] if mpi4py else [PYTHON]
    assert build_script_command(job.script, PYTHON, ["--x"], mpi4py) == [*front, *words, "--x"]
    assert (job.script.name, job.script.module_name) == (name, module)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("go.sh", "echo", ["/bin/sh", "./go.sh"]),
        ("go.sh", "#!/usr/bin/env bash\n", ["/usr/bin/env", "bash", "./go.sh"]),
        ("go", "#!/bin/sh -e\n", ["/bin/sh", "-e", "./go"]),
        ("bin/go.sh", "echo", ["/bin/sh", "./bin/go.sh"]),
    ],
)
def test_other_files_are_run_by_their_interpreter(tree: Tree, name: str, text: str, expected: list[str]) -> None:
    (tree.code / "bin").mkdir()
    tree.script(text, name)
    for mpi4py in (False, True):
        assert build_script_command(read(tree, SAGEMAKER_PROGRAM=name).script, PYTHON, ["--x"], mpi4py) == [
            *expected,
            "--x",
        ]


def test_a_program_is_run_as_it_is(tree: Tree) -> None:
    (tree.code / "tool").symlink_to("/bin/echo")
    for name, expected in (("tool", "./tool"), ("/bin/echo", "/bin/echo")):
        assert build_script_command(read(tree, SAGEMAKER_PROGRAM=name).script, PYTHON, [], False) == [expected]


@pytest.mark.parametrize("metadata", ["setup.py", "pyproject.toml"])
@pytest.mark.parametrize("name", ["pkg.jobs", "pkg", "train.py"])
def test_a_name_that_is_no_file_is_a_module_of_the_package(tree: Tree, metadata: str, name: str) -> None:
    tree.script("[project]\nname = 'pkg'", metadata)
    job = read(tree, SAGEMAKER_PROGRAM=name)
    module = name.removesuffix(".py")
    assert build_script_command(job.script, PYTHON, [], True) == [PYTHON, "-m", "mpi4py", "-m", module]
    assert (job.script.name, job.script.module_name) == (name, module)


@pytest.mark.parametrize("mpi4py", [False, True])
def test_a_function_is_called(tree: Tree, mpi4py: bool) -> None:
    job = read(tree, SAGEMAKER_TRAINING_MODULE="pkg.jobs:main")
    front = [PYTHON, "-m", "mpi4py"] if mpi4py else [PYTHON]
    assert build_script_command(job.script, PYTHON, ["--x", "1"], mpi4py) == [*front, "-c", FUNCTION, "--x", "1"]
    assert (job.script.name, job.script.module_name) == ("", "")


@pytest.mark.parametrize("name", sorted(code.STOCK_TOOLKITS))
def test_the_stock_toolkits_own_function_is_passed_over(tree: Tree, name: str) -> None:
    """A Dockerfile that was made for the stock toolkit sets it."""
    made = planned(tree, SAGEMAKER_TRAINING_MODULE=name)
    assert made.script == (PYTHON, "train.py")
    assert any("this toolkit runs the script instead" in note for note in made.notes)
    assert made.env["SM_FRAMEWORK_MODULE"] == name


@pytest.mark.parametrize("value", ["pkg", "pkg:", ":main", "pkg.:main", "pkg:main()", "a b:main", "pkg:main.other"])
def test_a_function_that_is_not_named_properly(tree: Tree, run: Run, value: str) -> None:
    assert run(SAGEMAKER_TRAINING_MODULE=value).code == 2
    problem, fix = f'SAGEMAKER_TRAINING_MODULE is {value!r}; it must be "package.module:function".', "Fix: set it so"
    assert tree.failure == f"{problem} {fix}, or unset it to run a script."


@pytest.mark.parametrize("name", ["-m", "-c print(1)", "-m pkg --flag", "--help", "-m pkg/jobs.py", "-mpkg"])
def test_a_name_that_reads_as_an_option(tree: Tree, run: Run, name: str) -> None:
    assert run(SAGEMAKER_PROGRAM=name).code == 2
    assert f"The script's name {name!r} looks like an option" in tree.failure
    assert '"-m package.module"' in tree.failure


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("pkg/", "The script 'pkg/' is a directory of CODE. Fix: to run it as a package, write \"-m pkg\""),
        ("notes.txt", "notes.txt is neither .py nor .sh nor executable. Fix: make it executable (chmod +x)"),
        ("train", "The script 'train' is not in"),  # pyproject.toml makes no package here
    ],
)
def test_what_cannot_be_run_is_named_with_a_fix(tree: Tree, run: Run, name: str, problem: str) -> None:
    package(tree)
    tree.script("data", "notes.txt")
    tree.script("[tool.ruff]\nline-length = 120\n", "pyproject.toml")
    assert run(SAGEMAKER_PROGRAM=name).code == 2
    assert problem.replace("CODE", str(tree.code)) in tree.failure


# They run


SAY = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), os.environ['SM_USER_ENTRY_POINT']]))"


def test_a_module_runs(tree: Tree, run: Run) -> None:
    package(tree, SAY)
    tree.hyperparameters(lr=0.1)
    done = run("more", SAGEMAKER_PROGRAM="-m pkg.jobs")
    assert json.loads(done.out) == [["--lr", "0.1", "more"], str(tree.code), "-m pkg.jobs"], done.err


def test_an_installed_module_needs_no_code_directory(tree: Tree, run: Run) -> None:
    tree.code.rmdir()
    assert run("--", "--help", SAGEMAKER_PROGRAM="-m json.tool").out.startswith("usage: ")
    assert tree.outcome() == {"success"}


@pytest.mark.parametrize(
    ("result", "code"),
    [("None", 0), ("0", 0), ("3", 3), ("True", 0), ("'trained'", 0), ("{}", 0), ("sys.exit(7)", 7), ("1 / 0", 1)],
)
def test_a_function_decides_on_the_exit_code(tree: Tree, run: Run, result: str, code: int) -> None:
    package(
        tree, f"import os, sys\ndef main():\n    print(sys.argv[1:], os.environ['SM_HP_LR'])\n    return {result}\n"
    )
    tree.hyperparameters(lr=0.1)
    done = run(SAGEMAKER_TRAINING_MODULE="pkg.jobs:main")
    assert (done.code, done.out) == (code, "['--lr', '0.1'] 0.1\n"), done.err
    assert tree.outcome() == {"failure" if code else "success"}


def test_a_function_that_is_not_there(tree: Tree, run: Run) -> None:
    package(tree)
    assert run(SAGEMAKER_TRAINING_MODULE="pkg.jobs:main").code == 1
    assert tree.failure.startswith("ImportError: cannot import name 'main' from 'pkg.jobs'")


@pytest.mark.mpi
@pytest.mark.parametrize(
    "named", [{"SAGEMAKER_PROGRAM": "-m pkg.jobs"}, {"SAGEMAKER_TRAINING_MODULE": "pkg.jobs:main"}]
)
@pytest.mark.parametrize(("ending", "code"), [("0", 0), ("1 / (rank - 1)", 1)])
def test_modules_and_functions_run_under_mpi(
    tree: Tree, run: Run, named: dict[str, str], ending: str, code: int
) -> None:
    """Rank 1 fails, and rank 0 waits for it: mpi4py ends both."""
    package(
        tree,
        "from mpi4py import MPI\n"
        "def main():\n"
        f"    rank = MPI.COMM_WORLD.rank\n    {ending}\n    MPI.COMM_WORLD.barrier()\n    print('rank', rank)\n"
        "if __name__ == '__main__': main()\n",
    )
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=2)
    done = run(**named)
    assert done.code == code, done.err
    lines = sorted(line.partition("] ")[2] for line in done.out.splitlines())
    assert lines == ([] if code else ["rank 0", "rank 1"])
    assert code == 0 or tree.failure.startswith("ZeroDivisionError")


# Flags


VALUES = {"fp16": True, "debug": False, "x": True, "lr": 0.1, "name": "true"}


@pytest.mark.parametrize(
    ("store_true", "words"),
    [
        (None, "--debug False --fp16 True --lr 0.1 --name true -x True"),
        (False, "--debug False --fp16 True --lr 0.1 --name true -x True"),
        ([], "--debug False --fp16 True --lr 0.1 --name true -x True"),
        (["fp16"], "--debug False --fp16 --lr 0.1 --name true -x True"),
        (["debug", "x"], "--fp16 True --lr 0.1 --name true -x"),
        (True, "--fp16 --lr 0.1 --name true -x"),
    ],
)
def test_a_script_with_flags_gets_flags(store_true: object, words: str) -> None:
    """Defect 21: the stock toolkit gives every flag a value, which argparse's store_true refuses."""
    assert format_arguments(VALUES, store_true) == words.split()


@pytest.mark.parametrize(
    ("store_true", "reason"),
    [
        ("all", "sagemaker_store_true is 'all'; allowed are true, and a list of names"),
        (["fp61"], "names 'fp61', which is not a hyperparameter. Did you mean 'fp16'?"),
        (["lr"], "names 'lr', which is 0.1; a flag is true or false"),
        ([3], "names 3, which is not a hyperparameter"),
    ],
)
def test_what_is_no_flag_is_refused(store_true: object, reason: str) -> None:
    with pytest.raises(ContractError) as refused:
        format_arguments(VALUES, store_true)
    assert reason in str(refused.value)


def test_argparse_takes_the_flags(tree: Tree, run: Run) -> None:
    tree.script(
        "import argparse, os; p = argparse.ArgumentParser(); p.add_argument('--fp16', action='store_true');"
        "p.add_argument('--debug', action='store_true'); p.add_argument('--lr', type=float);"
        "print(p.parse_args(), os.environ['SM_USER_ARGS'])"
    )
    tree.hyperparameters(fp16=True, debug=False, lr=0.1, sagemaker_store_true=["fp16", "debug"])
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.out == 'Namespace(fp16=True, debug=False, lr=0.1) ["--fp16","--lr","0.1"]\n', done.err


# Sizes


def large(count: int = 60, size: int = 2500) -> dict[str, str]:
    """150 KB in all, as many as the service takes."""
    return {f"p{number:02}": chr(97 + number % 26) * size for number in range(count)}


COUNT = (
    "import json, os, sys; e = os.environ; path = os.path.join(e['SM_INPUT_CONFIG_DIR'], 'hyperparameters.json');"
    "whole = {k: json.loads(v) for k, v in json.load(open(path)).items() if k != 'sagemaker_mpi_enabled'};"
    "args = dict(zip([w[2:] for w in sys.argv[1::2]], sys.argv[2::2]));"
    "assert args == whole == {n[6:].lower(): v for n, v in e.items() if n.startswith('SM_HP_')};"
    "print(len(args), sorted({'SM_HPS', 'SM_TRAINING_ENV', 'SM_USER_ARGS', 'SM_HOSTS'} - set(e)))"
)


@pytest.mark.parametrize("more", [{}, pytest.param({"sagemaker_mpi_enabled": True}, marks=pytest.mark.mpi)])
def test_hyperparameters_of_150_kilobytes(tree: Tree, run: Run, more: dict[str, object]) -> None:
    """Defect 17: the stock toolkit cannot start the script: a variable has 128 KiB at most."""
    tree.script(COUNT)
    tree.hyperparameters(**large(), **more)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert (done.code, done.out) == (0, "60 ['SM_HPS', 'SM_TRAINING_ENV', 'SM_USER_ARGS']\n"), done.err[-2000:]
    assert "left out: SM_HPS (15" in done.err
    assert f"hyperparameters.json and resourceconfig.json in {tree.base}/input/config" in done.err


@pytest.mark.mpi
@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
def test_hyperparameters_of_150_kilobytes_on_two_hosts(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as hosts:
        for host in hosts:
            host.tree.script(COUNT)
            host.tree.hyperparameters(**large(), sagemaker_mpi_enabled=True)
        processes = [host.start() for host in hosts]
        with running(*processes):
            first, worker = (host.finished(process) for host, process in zip(hosts, processes))
    assert (first.code, worker.code) == (0, 0), first.err[-2000:] + worker.err[-2000:]
    expected = "60 ['SM_HPS', 'SM_TRAINING_ENV', 'SM_USER_ARGS']"
    assert sorted(first.out.splitlines()) == [f"[0,algo-1] {expected}", f"[1,algo-2] {expected}"]


def test_the_largest_argument_that_linux_passes_is_passed(tree: Tree, run: Run) -> None:
    tree.script("import sys; print(len(sys.argv[2]))")
    tree.hyperparameters(text="x" * 131071)
    assert run(SAGEMAKER_PROGRAM="train.py").out == "131071\n"


def test_more_than_linux_passes_in_all(tree: Tree, run: Run) -> None:
    tree.script("")
    tree.hyperparameters(**large(count=40, size=100_000))
    assert run(SAGEMAKER_PROGRAM="train.py").code == 1
    assert "cannot be started" in tree.failure
    assert "Argument list too long" in tree.failure


def test_an_argument_that_linux_would_not_pass_is_named(tree: Tree, run: Run) -> None:
    tree.script("")
    tree.hyperparameters(text="x" * 131070 + "é")
    assert run(SAGEMAKER_PROGRAM="train.py").code == 2
    assert tree.failure == (
        "hyperparameters.json: text is 131,072 bytes as an argument of the script, and Linux passes at most 131,071 in "
        "one. Fix: put the value into a file of a channel, and pass its name to the script."
    )


WORD = st.characters(exclude_categories=["Cs"], exclude_characters="\0")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.text(WORD, min_size=1, max_size=20), min_size=1, max_size=4))
def test_a_command_too_long_for_mpirun_is_the_same_behind_the_shell(words: list[str]) -> None:
    repeated = [word * (MAX_ARGUMENT_BYTES // 16 // len(word)) for word in words] * (12 // len(words))
    script = [sys.executable, "-c", "import json, os, sys; print(json.dumps([sys.argv[1:], sorted(os.environ)]))"]
    command, variables = shorten_for_mpirun([*script, *repeated])
    assert max(map(len, command)) < 5000
    done = subprocess.run(command, env={"PATH": os.defpath, **variables}, capture_output=True, check=True)
    argv, names = json.loads(done.stdout)
    assert argv == repeated
    assert not [name for name in names if name.startswith("SHOAL_")]


def test_a_short_command_is_given_to_mpirun_as_it_is() -> None:
    assert shorten_for_mpirun(["a", "b c"]) == (["a", "b c"], {})


@pytest.mark.parametrize(
    ("name", "text", "is_wrong"),
    [
        ("go.sh", b"#!/bin/sh\r\nexec true\r\n", True),
        ("go.sh", b"set -e\r\nexec true\r\n", True),
        ("go", b"#!/usr/bin/env bash\r\nexec true\r\n", True),
        ("go.sh", b"#!/bin/sh\nprintf 'a\r\n'\n", False),
        ("train.py", b"import sys\r\nsys.exit(0)\r\n", False),
        ("run", b"#!/usr/bin/env python3\r\nimport sys\r\nsys.exit(0)\r\n", False),
    ],
)
def test_a_shell_script_with_line_ends_of_windows_is_named(
    tree: Tree, run: Run, name: str, text: bytes, is_wrong: bool
) -> None:
    (tree.code / name).write_bytes(text)
    assert run(SAGEMAKER_PROGRAM=name).code == (2 if is_wrong else 0)
    assert not is_wrong or f"Fix: sed -i 's/\\r$//' {name}" in tree.failure
