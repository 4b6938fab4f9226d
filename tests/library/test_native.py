"""Native code where a test of Python cannot lead it: TensorFlow's operations without memory."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "library/native"
WITHOUT_MEMORY = """\
#include <stdlib.h>
static void *no_memory(size_t count, size_t size)
{
    (void)count, (void)size;
    return NULL;
}
#define calloc no_memory
#include "tensorflow.c"

static int constructions, computations, code;
static TF_Status *new_status(void) { return (TF_Status *)&code; }
static void delete_status(TF_Status *status) { (void)status; }
static void set_status(TF_Status *status, int value, const char *text) { *(int *)status = value, puts(text); }
static void fail_construction(TF_OpKernelConstruction *of, TF_Status *it) { (void)of, (void)it, constructions++; }
static void fail_computation(TF_OpKernelContext *of, TF_Status *it) { (void)of, (void)it, computations++; }
static int num_inputs(TF_OpKernelContext *context) { return (void)context, 1; }

int main(void)
{
    kernel_t node = {.kind = SEND};
    tf.NewStatus = new_status, tf.DeleteStatus = delete_status, tf.SetStatus = set_status, tf.NumInputs = num_inputs;
    tf.OpKernelConstruction_Failure = fail_construction, tf.OpKernelContext_Failure = fail_computation;
    void *made = create_kernel((TF_OpKernelConstruction *)&node, SEND);
    compute(&node, (TF_OpKernelContext *)&node);
    return made || constructions != 1 || computations != 1 || code != RESOURCE_EXHAUSTED;
}
"""


def test_an_operation_of_tensorflow_without_memory_is_an_error_and_no_crash(tmp_path: Path) -> None:
    (tmp_path / "without_memory.c").write_text(WITHOUT_MEMORY)
    compiler = shlex.split(os.environ.get("CC") or "cc")
    command = [*compiler, "-std=c11", "-pthread", f"-I{NATIVE}", "without_memory.c", "-o", "without_memory", "-ldl"]
    subprocess.run(command, cwd=tmp_path, check=True)
    ended = subprocess.run([tmp_path / "without_memory"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended
    assert ended.stdout.count("There is no memory for an operation of smdistributed.") == 2
