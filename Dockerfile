# TIDE Serve for KubeRay and for `docker run`; docs/images.md has the commands. Both stages are scripts that also run
# without a container (tools/image/rehearse.sh), which is how they are tested.
#
# Base images by tag here; pin yours by digest with --build-arg BUILD_BASE=...@sha256:...
ARG BUILD_BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG RUNTIME_BASE=ubuntu:24.04

FROM ${BUILD_BASE} AS build
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++ python3.12 python3.12-venv python3.12-dev \
    && rm -rf /var/lib/apt/lists/*
# ON: the CUDA module must be built; OFF for an image without it. Architectures: docs/building.md.
ARG TIDE_CUDA=ON
ARG TIDE_CUDA_ARCHS=
ENV TIDE_CUDA=${TIDE_CUDA} TIDE_CUDA_ARCHS=${TIDE_CUDA_ARCHS} PYTHON=python3.12
COPY . /source
RUN mkdir -p /source/wheels && /source/tools/image/build_wheel.sh /source /wheels

FROM ${RUNTIME_BASE} AS install
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ca-certificates python3.12 python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
# A wheel of Torch in wheels/ of the context, for an image without CUDA; empty takes the locked one with its libraries.
ARG TORCH_WHEEL=
ENV PYTHON=python3.12
COPY --from=build /source/tools/image /image
COPY --from=build /source/deploy/requirements.lock /source/deploy/demo.lock /image/
COPY --from=build /source/wheels /image/wheels
COPY --from=build /wheels /wheels
RUN /image/install.sh /wheels /image /opt/tide ${TORCH_WHEEL:+/image/wheels/${TORCH_WHEEL}}

FROM ${RUNTIME_BASE}
# bash, grep and wget are what KubeRay's probes call. There is no compiler and no pip.
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bash ca-certificates python3.12 wget \
    && rm -rf /var/lib/apt/lists/* \
    && (userdel --remove ubuntu 2>/dev/null || true) \
    && groupadd --gid 1000 tide && useradd --uid 1000 --gid 1000 --no-create-home --home-dir /home/tide --shell /usr/sbin/nologin tide
COPY --from=install /opt/tide /opt/tide
# Written to at run time, as volumes: /tmp (Ray's sessions are in /tmp/ray), /dev/shm, and the cache of converted models.
ENV PATH=/opt/tide/bin:$PATH \
    HOME=/home/tide \
    HF_HOME=/tmp/huggingface \
    TIDE_CACHE_DIR=/tmp/tide-cache \
    MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_SERVE_HAPROXY_BINARY_PATH=/opt/tide/bin/tide-haproxy \
    RAY_preload_python_modules=deploy.preload
USER 1000:1000
WORKDIR /tmp
EXPOSE 8000 9000
# KubeRay brings its own command. By hand: mount a config like deploy/config.yaml.
CMD ["tide", "serve", "/etc/tide/config.yaml"]
