# The artifact with everything it needs to run without a network: docker build -t artifact . && docker run --rm artifact
#
# Build arguments: BASE_IMAGE; TORCH=cpu|cuda; TORCH_INDEX, the index of PyTorch's CPU builds; PIP_INDEX_URL, another
# package index; EXTRAS=ray, for campaigns on a cluster; EXTRA_CA, a PEM certificate to trust; FLASH_ATTN, what pip should install for flash-attn (a wheel's URL);
# COMMIT, noted in the image. Plain Dockerfile syntax only, so that the classic builder and podman read it too.
ARG BASE_IMAGE=debian:bookworm-slim
FROM ${BASE_IMAGE}

# gcc and the headers stay: Triton compiles its launcher at run time. libgomp1 is Numba's thread pool.
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev libgomp1 python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home --home-dir /home/artifact artifact

ARG EXTRA_CA=
RUN if [ -n "$EXTRA_CA" ]; then \
      printf '%s\n' "$EXTRA_CA" > /usr/local/share/ca-certificates/extra.crt && update-ca-certificates; fi
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
    PATH=/opt/venv/bin:$PATH ARTIFACT_DATA=/opt/data PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/artifact
ARG PIP_INDEX_URL=
ARG TORCH=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements requirements
ARG EXTRAS=
RUN VENV=/opt/venv PIP_NO_CACHE_DIR=1 requirements/setup.sh --packages $EXTRAS
ARG FLASH_ATTN=
RUN if [ -n "$FLASH_ATTN" ]; then pip install --no-cache-dir --no-deps --no-build-isolation "$FLASH_ATTN"; fi

# The model, the text where its hub answers, and the model's memory-mapped form. These few files change rarely.
COPY kernels/__init__.py kernels/identity.py kernels/
COPY artifact/__init__.py artifact/errors.py artifact/embedded.py artifact/text.py artifact/
RUN python -m artifact.embedded
COPY artifact/shapes.py artifact/
COPY artifact/engine/__init__.py artifact/engine/checkpoints.py artifact/engine/gguf_file.py artifact/engine/gguf_header.py \
     artifact/engine/prepared_files.py artifact/engine/rope.py artifact/engine/
RUN python -c 'from artifact import embedded; from artifact.engine import checkpoints; checkpoints.open_checkpoint(str(embedded.path()))' \
 && chmod -R a+rX /opt/data/converted

COPY . .
RUN pip install --quiet --no-deps --no-build-isolation --editable . \
 && python -m compileall -q artifact kernels claims paper_tables \
 && chmod -R a+rX . \
 && mkdir -p /results && chmod 1777 /results

# All that is written at run time goes to /tmp and /results, so the root file system may be read-only.
ENV ARTIFACT_DATA=/tmp/data ARTIFACT_RUNS=/results HOME=/tmp XDG_CACHE_HOME=/tmp/cache NUMBA_CACHE_DIR=/tmp/numba \
    TRITON_CACHE_DIR=/tmp/triton MPLCONFIGDIR=/tmp/mpl HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG COMMIT=
LABEL org.opencontainers.image.title="Sparse decoding artifact" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${COMMIT}"
USER 1000
WORKDIR /results
ENTRYPOINT ["/opt/artifact/docker/entrypoint.sh"]
