#!/usr/bin/env bash
# venv.sh DIR - installs the PyTorch, transformers and PEFT that test_hf.sh, test_peft.sh and test_launch.sh need, into a virtual environment
#
# From the index that pip is configured with: about 600 MB. Of PyTorch's CUDA libraries, another 2 GB, only the runtime is
# installed, which reports that there is no GPU: the others are loaded, but none of their functions is called then. For
# each of these a library of our own has one that returns an error. The file DIR/ready is written last; if it is there,
# nothing is done.
dir=$1 torch=2.15.0 transformers=5.24.0 peft=0.21.2 accelerate=1.15.0
[ -e "$dir/ready" ] && exit
mkdir -p "${dir%/*}" || exit
exec 9>"$dir.lock"
flock 9 2>/dev/null     # two runs at the same time: the second finds it ready
[ -e "$dir/ready" ] && exit
rm -rf "$dir"
export PYTHONPYCACHEPREFIX=$dir/pycache PYTHONDONTWRITEBYTECODE= # as in run.sh
python3 -m venv "$dir" || exit
pip() { "$dir/bin/python" -m pip --disable-pip-version-check -q install --no-compile "$@"; }
pip --no-deps torch==$torch nvidia-cuda-runtime==13.* || exit
pip numpy filelock typing_extensions sympy networkx jinja2 fsspec transformers==$transformers psutil || exit
pip --no-deps peft==$peft accelerate==$accelerate || exit

lib=$(echo "$dir"/lib/python3*/site-packages/torch/lib)
{ objdump -p "$lib"/*.so | awk '$1 == "NEEDED" && $2 ~ /^lib(cu|nv|nccl)/ && $2 !~ /^libcuda(rt)?[.]/ { print $2 }' | sort -u >"$dir/absent"
  nm -D --undefined-only "$lib"/*.so | awk '$1 == "U" && $2 ~ /^_*(cu|nv|nccl)/ && $2 !~ /^_*cuda/ { sub(/@.*/, "", $2); print $2 }' |
      sort -u >"$dir/functions"; } || exit
if [ -s "$dir/absent" ]; then
    # 100: cudaErrorNoDevice. The names of the absent libraries belong to empty ones, so that the loader, which compares
    # versions of symbols only in a library of the expected name, accepts the functions.
    sed 's/.*/int &(void) { return 100; }/' "$dir/functions" >"$dir/functions.c"
    cc -w -fno-builtin -shared -fPIC "$dir/functions.c" -o "$lib/libno_gpu.so" &&
        cc -shared -x c /dev/null -x none -o "$lib/libabsent.so" -Wl,--no-as-needed "$lib/libno_gpu.so" \
            -Wl,-rpath,'$ORIGIN' || exit
    while read -r name; do ln -s libabsent.so "$lib/$name"; done <"$dir/absent"
fi
"$dir/bin/python" -c 'import torch, transformers, numpy, peft' || exit
: >"$dir/ready"
