# etcd as Debian ships it, for compose.yaml.
ARG DEBIAN_IMAGE=docker.io/library/debian:bookworm-slim

FROM ${DEBIAN_IMAGE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends etcd-server \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 10001 -g 10001 /var/lib/headrace-etcd
USER 10001:10001
VOLUME /var/lib/headrace-etcd
ENTRYPOINT ["etcd", "--data-dir=/var/lib/headrace-etcd", "--listen-client-urls=http://0.0.0.0:2379"]
CMD ["--advertise-client-urls=http://etcd:2379"]
