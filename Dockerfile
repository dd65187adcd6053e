# One image per platform, with every backend that `attnsuite run --suite device` can take there.
#   docker build --target cuda -t attnsuite-cuda . && docker run --gpus all -v "$PWD/runs:/runs" attnsuite-cuda
#   docker build --target tpu -t attnsuite-tpu . && docker run --privileged --net host -v "$PWD/runs:/runs" attnsuite-tpu
# The lines that install are those that `attnsuite doctor` says (tests/test_container.py).
FROM python:3.12-slim AS base
WORKDIR /opt/attnsuite
COPY . .
ENTRYPOINT ["attnsuite"]
CMD ["run", "--suite", "device", "--out", "/runs/device"]

FROM base AS cuda
RUN pip install '.[cuda12]'
RUN pip install '.[kvax]'
RUN pip install '.[tokamax]'

FROM base AS tpu
RUN pip install '.[tpu]'
RUN pip install '.[tokamax]'
