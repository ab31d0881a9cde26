# The kit's image from its wheel, for a project without a clone of the kit:
#
#   cp torch_muster-*.whl docker/      # from a clone also: cp constraints.txt docker/
#   docker build -f docker/wheel.Dockerfile -t muster:cpu docker
#
# constraints.txt beside it has the versions that the kit was tested with; `muster init` writes both. For the base image's digest,
# PyTorch's CPU wheels, a proxy and InfiniBand see the kit's own Dockerfile: the same arguments and secrets work here.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Triton compiles a launcher for each kernel with gcc: compile=true on GPUs needs it.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 1000 muster \
 && useradd --uid 1000 --gid 1000 --create-home muster \
 && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The root file system may be read-only: caches go to /tmp, a run's files to /job/runs.
ENV HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib TORCHINDUCTOR_CACHE_DIR=/tmp/inductor TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL TORCH_INDEX
COPY *.whl constraints.txt /opt/muster/
# hadolint ignore=DL3013,DL3042
RUN --mount=type=secret,id=ca,target=/run/secrets/ca \
    --mount=type=secret,id=pip,target=/run/secrets/pip.conf \
    --mount=type=cache,target=/var/cache/pip \
    export PIP_CACHE_DIR=/var/cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1 \
 && if [ -e /run/secrets/pip.conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip.conf; fi \
 && if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
 && if [ -n "${TORCH_INDEX:-}" ]; then \
      pip install -c /opt/muster/constraints.txt --no-deps --index-url "$TORCH_INDEX" torch torchvision; \
    fi \
 && pip install -c /opt/muster/constraints.txt /opt/muster/*.whl
RUN install -d -o muster -g muster /job/runs && echo "PATH=/opt/venv/bin:\$PATH" > /etc/profile.d/muster.sh
WORKDIR /job
ENTRYPOINT ["tini", "--"]
CMD ["torchrun", "--standalone", "--nproc-per-node=2", "-m", "muster"]
USER 1000:1000
