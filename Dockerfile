# Two stages: build a virtual environment with CPU wheels, then copy it into a small image that runs as nobody.
# Another build of PyTorch comes from another index: `--build-arg TORCH_INDEX=…`.
FROM python:3.11-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python -m venv /opt/mocha
RUN /opt/mocha/bin/pip install --no-cache-dir "torch==2.11.*" "torchaudio==2.11.*" \
    --index-url "$TORCH_INDEX"
COPY pyproject.toml README.md LICENSE ./
COPY model model
COPY server server
COPY training training
COPY clients clients
RUN /opt/mocha/bin/pip install --no-cache-dir .

FROM python:3.11-slim
COPY --from=build /opt/mocha /opt/mocha
ENV PATH=/opt/mocha/bin:$PATH MOCHA_HOST=0.0.0.0 MOCHA_PORT=8000 PYTHONUNBUFFERED=1
RUN useradd --system --no-create-home mocha
USER mocha
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s CMD \
    ["python", "-c", "import urllib.request as r; r.urlopen('http://localhost:8000/health', timeout=4)"]
ENTRYPOINT ["mocha-asr"]
CMD ["serve"]
