#!/bin/bash
# Runs the kernels of flash_cpu for ARM on another processor: `attnsuite judge` in an AArch64 Python, in QEMU's user mode.
#
#     bash tests/aarch64.sh /tmp/aarch64 --cases 'causal,decode-*' --random 0 --out DIR
#
# These 31 problems passed the judge, with --cell-timeout 1800: causal,gqa-4,decode-1,decode-4,sinks-decode,
# log-sum-exp-decode,combination-ragged,combination-bfloat16,combination-float16,soft-cap,bias-per-head,mask-per-head,
# alibi,function-dilated,score,sinks,segments-causal,head-dim-72,big-logits-float32,kv-int8,decode-window,decode-hnd,
# decode-bfloat16,function-decode,score-decode,alibi-decode,pages,pages-decode,pages-float8,kv-int8-pages-hnd,
# values-in-keys-decode.
#
# On Debian or Ubuntu as root, where this installs qemu-user-static and debootstrap. The first argument is a folder for
# Debian's AArch64 Python and the AArch64 wheels (2 GB, made once); the others are those of `attnsuite judge flash_cpu`.
# It judges numbers: an emulator's times mean nothing. A record's `platform` says aarch64, its `cpu` names the host's.
set -euo pipefail
home=$(realpath -m "$1")
here=$(realpath "$(dirname "$0")/..")
shift
python="$home/root/usr/bin/python3.11"
if [ ! -e "$home/complete" ]; then
  apt-get install -y --no-install-recommends qemu-user-static debootstrap
  mkdir -p "$home"
  debootstrap --foreign --variant=minbase --arch=arm64 --include=python3,libstdc++6 bookworm "$home/root"
  for package in "$home"/root/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$home/root"; done
  platforms=(--platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64)
  python3 -m pip install --target "$home/site" --python-version 3.11 --implementation cp --only-binary=:all: \
    "${platforms[@]}" --platform manylinux2014_aarch64 "jax==0.10.1" "llvmlite>=0.50,<0.51" "flax>=0.12.7" "numpy>=2" \
    scipy tabulate psutil rich markdown-it-py tyro jaxtyping safetensors msgspec matplotlib optax pytest hypothesis
  touch "$home/complete"
fi
# Workers are started as sys.executable, which has to be a program of this processor.
cat > "$home/python" <<END
#!/bin/bash
unset JAX_COMPILATION_CACHE_DIR # the host's programs
export PYTHONPATH=$here/src:$here/tests:$home/site JAX_PLATFORMS=cpu XDG_CACHE_HOME=$home/cache PYTHONDONTWRITEBYTECODE=1
export XLA_FLAGS=--xla_backend_optimization_level=0 OPENBLAS_NUM_THREADS=1 OPENBLAS_CORETYPE=ARMV8
exec qemu-aarch64-static -L $home/root $python "\$@"
END
chmod +x "$home/python"
echo "import sys; sys.executable = '$home/python'" > "$home/site/sitecustomize.py"
exec "$home/python" -m attnsuite judge flash_cpu "$@"
