# A decode worker: vLLM for CPUs, and Mooncake.
# From the repository's root: docker build -f docker/decode.Dockerfile .
# For CUDA, add --build-arg REQUIREMENTS=worker-cuda (docs/cuda.md).
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG PIP_ARGS=""
ARG REQUIREMENTS=worker
WORKDIR /src
RUN python -m venv /opt/tools && python -m venv /opt/headrace
COPY requirements/build.txt requirements/${REQUIREMENTS}.txt requirements/
RUN /opt/tools/bin/pip install --no-cache-dir --no-deps --require-hashes ${PIP_ARGS} -r requirements/build.txt
RUN /opt/headrace/bin/pip install --no-cache-dir --no-deps --require-hashes ${PIP_ARGS} \
      -r requirements/${REQUIREMENTS}.txt
COPY pyproject.toml README.md LICENSE ./
COPY scripts/compile_protos.py scripts/hatch_build.py scripts/
COPY protos/ protos/
COPY libs/ libs/
COPY services/ services/
RUN /opt/tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/headrace/bin/pip install --no-cache-dir --no-deps --no-index /dist/*.whl

FROM ${PYTHON_IMAGE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 libcurl4 libnuma1 libstdc++6 gcc g++ \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/headrace /opt/headrace
# A new volume takes the owner of the folder that it covers.
RUN install -d -o 10001 -g 10001 /credentials
USER 10001:10001
ENV PYTHONUNBUFFERED=1 HOME=/tmp
ENTRYPOINT ["/opt/headrace/bin/headrace-decode"]
