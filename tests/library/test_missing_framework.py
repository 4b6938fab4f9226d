"""What the library says where a framework is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

HIDDEN = """
import sys
sys.modules[{framework!r}] = None
import {module}
"""
MODULES = ("dataparallel.{}", "dataparallel.{}.distributed", "modelparallel.{}", "core.{}.devices")


def error(program: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    return ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("framework", "name"), [("torch", "PyTorch"), ("tensorflow", "TensorFlow")])
def test_a_framework_that_is_not_there_is_named(framework: str, name: str, module: str) -> None:
    message = error(HIDDEN.format(framework=framework, module=f"smdistributed.{module.format(framework)}"))
    assert message.startswith(f"ModuleNotFoundError: No module named '{framework}': ")
    assert f"smdistributed for {name}" in message
    assert f"Fix: pip install {framework}" in message
    assert sys.prefix in message


def test_a_module_that_a_framework_lacks_is_its_own_error() -> None:
    program = (
        "from smdistributed.core.exceptions import missing_framework_error\n"
        "raise missing_framework_error(ModuleNotFoundError('No module named sympy', name='sympy'), 'PyTorch', 'torch')"
    )
    assert error(program) == "ModuleNotFoundError: No module named sympy"
