# A decode worker with Mooncake. The build argument REQUIREMENTS chooses the engine: worker (vLLM for CPUs),
# worker-cuda (vLLM for CUDA: docs/cuda.md) or sim (the simulated engine).
# From the repository's root: docker build -f docker/decode.Dockerfile .
ARG DEBIAN_IMAGE=docker.io/library/debian:bookworm-slim

FROM ${DEBIAN_IMAGE} AS base
# Of the standard library, only modules that services import stay compiled.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 tini \
    && rm -rf /usr/bin/tini-static /usr/lib/python3.11/pydoc_data /usr/lib/python3.11/test \
    && find /usr/lib/python3.11 -name __pycache__ -prune -exec rm -r {} + \
    && python3 -c "import argparse, asyncio, concurrent.futures, ctypes, dataclasses, email.message, http.client, \
importlib.metadata, inspect, json, logging.handlers, multiprocessing, platform, ssl, tempfile, tomllib, urllib.request, \
uuid, zipfile" \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log

FROM base AS build
# Up to the lock file, this stage is the same in all images.
RUN apt-get update \
    && apt-get install -y --no-install-recommends binutils python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python3 -m venv /opt/tools && python3 -m venv --without-pip /opt/headrace
ARG PIP_ARGS=""
COPY requirements/build.txt requirements/
RUN /opt/tools/bin/pip install --no-cache-dir --no-deps --require-hashes ${PIP_ARGS} -r requirements/build.txt
ARG REQUIREMENTS=worker
COPY requirements/${REQUIREMENTS}.txt requirements/
RUN /opt/tools/bin/pip --python /opt/headrace/bin/python install --no-cache-dir --no-deps --require-hashes ${PIP_ARGS} \
      -r requirements/${REQUIREMENTS}.txt
COPY pyproject.toml README.md LICENSE ./
COPY scripts/compile_protos.py scripts/hatch_build.py scripts/
COPY protos/ protos/
COPY libs/ libs/
COPY services/ services/
RUN /opt/tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/tools/bin/pip --python /opt/headrace/bin/python install --no-cache-dir --no-compile --no-deps --no-index \
      /dist/*.whl
COPY scripts/shrink_environment.py scripts/image_sbom.py scripts/
# This stage is the same for all workers, so their images share what it installs.
RUN for program in headrace-prefill headrace-decode headrace-worker headrace-probe; do \
         /opt/headrace/bin/$program --help >/dev/null || exit 1; done \
    && install -D scripts/image_sbom.py /opt/headrace/share/image_sbom.py

FROM base
ARG REQUIREMENTS=worker
# What Mooncake links to. vLLM compiles kernels when it starts, so its variants have a compiler, and `sim` has none.
RUN case "${REQUIREMENTS}" in sim) compiler="" ;; *) compiler="gcc g++ libpython3-dev" ;; esac \
    && apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers libcurl4 libnuma1 libstdc++6 ${compiler} \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
COPY --from=build /opt/headrace /opt/headrace
# A new volume takes the owner of the folder that it covers.
RUN install -d -o 10001 -g 10001 /credentials \
    && /opt/headrace/bin/python /opt/headrace/share/image_sbom.py headrace-decode >/opt/headrace/share/sbom.cdx.json
ARG REVISION=""
LABEL org.opencontainers.image.title="headrace-decode" \
      org.opencontainers.image.description="Headrace: a worker that generates tokens" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
ENV PATH=/opt/headrace/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HEADRACE_DECODE_HEALTH_LISTEN=127.0.0.1:7059
EXPOSE 7053 7056 7059
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=600s --retries=3 CMD ["/opt/headrace/bin/headrace-probe"]
# tini passes signals to the service, returns its exit status, and reaps orphans. A process that is not process 1 can be
# ended by its own kill timer.
ENTRYPOINT ["/usr/bin/tini", "-s", "--", "/opt/headrace/bin/headrace-decode"]
