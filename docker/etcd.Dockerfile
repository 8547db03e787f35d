# etcd as Debian ships it, for compose.yaml.
ARG DEBIAN_IMAGE=docker.io/library/debian:bookworm-slim

FROM ${DEBIAN_IMAGE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends etcd-client etcd-server \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
    && install -d -o 10001 -g 10001 /var/lib/headrace-etcd
LABEL org.opencontainers.image.title="headrace-etcd" \
      org.opencontainers.image.description="etcd of Debian, for the registry of Headrace"
USER 10001:10001
VOLUME /var/lib/headrace-etcd
EXPOSE 2379
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s --retries=3 CMD ["etcdctl", "endpoint", "health"]
ENTRYPOINT ["etcd", "--data-dir=/var/lib/headrace-etcd", "--listen-client-urls=http://0.0.0.0:2379"]
CMD ["--advertise-client-urls=http://etcd:2379"]
