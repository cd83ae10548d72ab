# headstart serve in a container: docker build -t headstart . && docker run -p 8000:8000 headstart [MODEL] [FLAGS]

FROM python:3.11-slim AS build
# any g++ from 12 on will do
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY headstart headstart
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
# any version will do
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libstdc++6 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home headstart
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -r /wheels
USER 1000
# models that were fetched outlive the container when a volume is mounted here
ENV HEADSTART_CACHE=/home/headstart/cache HF_HOME=/home/headstart/cache/huggingface
RUN mkdir -p "$HEADSTART_CACHE"
VOLUME /home/headstart/cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["headstart", "serve", "--host", "0.0.0.0"]
