# docker build -t training-at-scale . && docker run --rm -it --shm-size=1g -p 127.0.0.1:8888:8888 training-at-scale
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends make procps hostname iproute2 \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home learner && install -d -o learner -g learner /home/learner/course
USER learner
WORKDIR /home/learner/course
COPY --chown=learner . .

# PyTorch for CPUs, which saves some GB. For GPUs: leave this line out, and run with --gpus all.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN make setup PIP_FLAGS=--no-cache-dir

EXPOSE 8888
CMD ["make", "lab", "LAB=--ip=0.0.0.0 --no-browser"]
