"""The compilers of images: what they make runs, and devel variants are the runtime images but for those."""

from __future__ import annotations

import docker

from shoal.sources import packages

from ..tested_images import PYTORCH_CPU, PYTORCH_CPU_DEVEL, PYTORCH_CU117_DEVEL, TENSORFLOW_DEVEL
from .image_containers import MATRIX

# An operator of PyTorch that is compiled and loaded, from torch's documentation of its stable ABI. To compile all
# headers that torch/extension.h includes takes 20 s. The preprocessor alone finds a missing one in 1 s.
EXTENSION = """
import subprocess, sysconfig, torch
from torch.utils import cpp_extension
source = '''
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
int64_t length(torch::stable::Tensor x) { return x.numel(); }
STABLE_TORCH_LIBRARY(mine, m) { m.def("length(Tensor x) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(mine, CompositeExplicitAutograd, m) { m.impl("length", TORCH_BOX(&length)); }
'''
cpp_extension.load_inline("mine", cpp_sources=source, is_python_module=False, no_implicit_headers=True)
paths = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
reads = ["c++", "-std=c++20", "-M", "-o", "/dev/null", "-x", "c++", "-", *(f"-I{path}" for path in paths)]
subprocess.run(reads, input=b"#include <torch/extension.h>", check=True)
print(torch.ops.mine.length(torch.ones(3)))
"""
# With the other torch, a library that is linked to it includes one of its headers.
LINKED = """
import ctypes, pathlib
from torch.utils.cpp_extension import load
source = pathlib.Path("/tmp/linked.cpp")
source.write_text('''
#include <c10/core/DeviceType.h>
extern "C" int length() { return c10::DeviceTypeName(c10::DeviceType::CUDA).size(); }
''')
load("linked", sources=[str(source)], build_directory="/tmp", is_python_module=False)
print(ctypes.CDLL("/tmp/linked.so").length())
"""
# Without a precompiled header, which takes longer than the one kernel that would use it.
COMPILED = """
import torch
torch._inductor.config.cpp_cache_precompile_headers = False
print(torch.compile(lambda x: torch.relu(x) * 2 + 1)(torch.ones(3)).sum().item())
"""
# The operation of TensorFlow's guide "Create an op".
OPERATION = r"""
import pathlib, subprocess
import tensorflow as tf
source = pathlib.Path("/tmp/zero_out.cc")
source.write_text('''
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
using namespace tensorflow;
REGISTER_OP("ZeroOut").Input("to_zero: int32").Output("zeroed: int32");
class ZeroOutOp : public OpKernel {
 public:
  explicit ZeroOutOp(OpKernelConstruction* context) : OpKernel(context) {}
  void Compute(OpKernelContext* context) override {
    auto input = context->input(0).flat<int32>();
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, context->input(0).shape(), &output));
    auto flat = output->flat<int32>();
    for (int i = 0; i < input.size(); i++) flat(i) = i ? 0 : input(0);
  }
};
REGISTER_KERNEL_BUILDER(Name("ZeroOut").Device(DEVICE_CPU), ZeroOutOp);
''')
flags = tf.sysconfig.get_compile_flags() + tf.sysconfig.get_link_flags()
subprocess.run(["c++", "-shared", "-fPIC", "-o", "/tmp/zero_out.so", str(source), *flags], check=True)
print(int(tf.reduce_sum(tf.load_op_library("/tmp/zero_out.so").zero_out([5, 4, 3]))))
"""


def printed(client: docker.DockerClient, image: str, program: str) -> str:
    """The last word that a program prints in a container without a network, as an ordinary user."""
    output: bytes = client.containers.run(
        image, ["python", "-c", program], remove=True, network_mode="none", user="12345", environment={"HOME": "/tmp"}
    )
    return output.decode().split()[-1]


def test_an_extension_of_pytorch_is_built(client: docker.DockerClient) -> None:
    assert printed(client, PYTORCH_CPU_DEVEL, EXTENSION) == "3"


def test_a_library_is_linked_to_the_oldest_pytorch(client: docker.DockerClient) -> None:
    assert printed(client, PYTORCH_CU117_DEVEL, LINKED) == "4"


def test_torch_compile_works(client: docker.DockerClient) -> None:
    """With the default backend, which compiles C++ for the CPU, and the small compiler of the runtime image."""
    assert printed(client, PYTORCH_CPU, COMPILED) == "9.0"


def test_an_operation_of_tensorflow_is_built(client: docker.DockerClient) -> None:
    assert printed(client, TENSORFLOW_DEVEL, OPERATION) == "5"


def test_layers_are_shared_with_the_runtime_variant(client: docker.DockerClient) -> None:
    """All but those of the compilers and of our packages: it costs little space where the runtime variant is too."""
    for devel in [image for image in MATRIX.images if image.variant == "devel"]:
        layers = [
            client.images.get(tag).attrs["RootFS"]["Layers"] for tag in (devel.tag, devel.tag.removesuffix("-devel"))
        ]
        own = set(layers[0]) - set(layers[1])
        compiled = 0 if packages.can_compile_for(devel.python_version) else 4
        expected = "compilers, rehearsal, checkpoint, library, the compiled part of it, toolkit; bytecode"
        assert len(own) == 6 + compiled, f"{devel.tag}: {expected}"
