# The registry: no numpy, torch, vllm or mooncake inside.
# From the repository's root: docker build -f docker/registry.Dockerfile .
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG PIP_ARGS=""
WORKDIR /src
RUN python -m venv /opt/tools && python -m venv /opt/headrace
COPY requirements/build.txt requirements/registry.txt requirements/
RUN /opt/tools/bin/pip install --no-cache-dir --no-deps --require-hashes ${PIP_ARGS} -r requirements/build.txt
# etcd3 is source only: the setuptools of build.txt builds it, since pip's isolated builds fetch one without a hash.
RUN /opt/tools/bin/pip wheel --no-cache-dir --no-deps --require-hashes --no-build-isolation ${PIP_ARGS} \
      --wheel-dir /wheelhouse -r requirements/registry.txt \
    && /opt/headrace/bin/pip install --no-cache-dir --no-deps --no-index /wheelhouse/*.whl
COPY pyproject.toml README.md LICENSE ./
COPY scripts/compile_protos.py scripts/hatch_build.py scripts/
COPY protos/ protos/
COPY libs/ libs/
COPY services/ services/
RUN /opt/tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/headrace/bin/pip install --no-cache-dir --no-deps --no-index /dist/*.whl

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/headrace /opt/headrace
# A new volume takes the owner of the folder that it covers. credentials.sh writes one volume for each service.
RUN install -d -o 10001 -g 10001 /credentials /credentials/key /credentials/registry /credentials/router \
      /credentials/prefill /credentials/decode /credentials/planner /credentials/operator
USER 10001:10001
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["/opt/headrace/bin/headrace-registry"]
