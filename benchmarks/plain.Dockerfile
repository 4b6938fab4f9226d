# What one writes by hand for the content of the CUDA 11 PyTorch image, with all that its wheels have: the rival of benchmarks/images.py, built by
# `docker build`. Its context has our packages, the locked requirements of all layers, and this machine's configuration.
ARG BASE
FROM ${BASE} AS wheels
RUN --mount=type=bind,source=machine,target=/run/machine \
    --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt/lists,sharing=locked \
    export APT_CONFIG=/run/machine/apt.conf DEBIAN_FRONTEND=noninteractive \
    && apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-pip
COPY checkpoint /src/checkpoint
COPY library /src/library
COPY rehearsal /src/rehearsal
RUN --mount=type=bind,source=machine,target=/run/machine --mount=type=cache,target=/root/.cache/pip \
    PIP_CONFIG_FILE=/run/machine/pip.conf python3 -m pip wheel --no-deps --wheel-dir /wheels /src/checkpoint /src/library /src/rehearsal

FROM ${BASE}
RUN --mount=type=bind,source=machine,target=/run/machine \
    --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt/lists,sharing=locked \
    export APT_CONFIG=/run/machine/apt.conf DEBIAN_FRONTEND=noninteractive \
    && apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY requirements.txt /src/requirements.txt
RUN --mount=type=bind,source=machine,target=/run/machine --mount=type=cache,target=/root/.cache/pip \
    PIP_CONFIG_FILE=/run/machine/pip.conf pip install --require-hashes --no-deps -r /src/requirements.txt \
    && ls -d /opt/venv/lib/python3.*/site-packages/nvidia/*/lib > /etc/ld.so.conf.d/nvidia-wheels.conf \
    && ldconfig
COPY --from=wheels /wheels /wheels
RUN pip install --no-index --no-deps /wheels/*.whl
COPY toolkit /src/toolkit
RUN --mount=type=bind,source=machine,target=/run/machine --mount=type=cache,target=/root/.cache/pip \
    PIP_CONFIG_FILE=/run/machine/pip.conf pip install --no-deps /src/toolkit
ENV LANG=C.UTF-8 PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    OMPI_MCA_plm_rsh_agent=ssh:rsh:/bin/false OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
CMD ["train"]
