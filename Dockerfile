# t3c serve without torch. Build it, then give it an artifact:
#   docker build -t t3c-serve .
#   docker run --rm -p 8000:8000 -e T3C_ADMIN_TOKEN -v "$PWD/out/demo/digits.t3c:/artifact:ro" t3c-serve
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt '.[serve,openvino,text]'

RUN useradd --create-home --uid 10001 t3c
USER t3c
WORKDIR /home/t3c
# Compiled profiles: mount a volume here and the next container starts faster.
ENV T3C_CACHE=/home/t3c/cache
RUN mkdir cache

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=2)"]
ENTRYPOINT ["t3c", "serve", "/artifact", "--host", "0.0.0.0"]
