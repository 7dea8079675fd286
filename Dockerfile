# Two stages: build a virtual environment, then copy it into an image that runs as a user without rights.
# PyTorch's CPU wheels make it far smaller: `--build-arg TORCH_INDEX=…`, the index that PyTorch's install page names.
FROM python:3.11-slim AS build
ARG TORCH_INDEX
WORKDIR /src
RUN python -m venv /opt/mocha
RUN /opt/mocha/bin/pip install --no-cache-dir "torch==2.11.*" "torchaudio==2.11.*" \
    ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY model model
COPY server server
COPY training training
COPY clients clients
RUN /opt/mocha/bin/pip install --no-cache-dir .

FROM python:3.11-slim
# How names in lists of phrases sound.
RUN apt-get update && apt-get install -y --no-install-recommends espeak-ng && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/mocha /opt/mocha
ENV PATH=/opt/mocha/bin:$PATH MOCHA_HOST=0.0.0.0 MOCHA_PORT=8000 PYTHONUNBUFFERED=1
RUN useradd --system --no-create-home --uid 10001 mocha
# Large uploads are spooled to it, also where the rest of the file system is read-only.
VOLUME /tmp
# By number, as Kubernetes wants to see that it is not root.
USER 10001
EXPOSE 8000
# Another port is MOCHA_PORT, or one of the host's: `-p 2700:8000`.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s CMD \
    ["sh", "-c", "python -c \"import urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://localhost:$MOCHA_PORT/health', timeout=4)\""]
ENTRYPOINT ["mocha-asr"]
CMD ["serve"]
