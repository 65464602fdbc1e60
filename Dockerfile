# An image for CUDA machines: the checkout with everything that an evaluation needs, from the lock.
#   docker build -t kvcompress .
#   docker run --gpus all --rm -v "$PWD/results:/kvcompress/results" -v "$HOME/.cache/huggingface:/models" \
#       kvcompress eval textvqa_val llava-hf/llava-onevision-qwen2-7b-ov-hf snapkv 0.2 --limit 100
# PyPI's torch brings its own CUDA libraries; of the machine it needs the driver alone.
FROM python:3.12-slim
RUN pip install --no-cache-dir uv
WORKDIR /kvcompress
ENV HF_HOME=/models
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY kvcompress kvcompress
COPY lmms_eval_plugins lmms_eval_plugins
COPY configs configs
RUN uv pip install --system --no-cache --constraint constraints.txt -e ".[eval,quantized]"
ENTRYPOINT ["kvcompress"]
