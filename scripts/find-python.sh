#!/usr/bin/env bash
# Print the path of a Python >= 3.12 that can make virtual environments, or say how to get one.
# PATH comes first, then pyenv's versions. Releases that megatron-core has wheels for (3.12, 3.13)
# come before newer ones, which would have to compile it.
set -u

usable() {
    # A pyenv shim is on PATH even where its version is not selected, so each candidate is run.
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

consider() {
    if command -v "$1" >/dev/null 2>&1 && usable "$1"; then
        "$1" -c 'import sys; print(sys.executable)'
        exit 0
    fi
}

if [ -n "${PYTHON:-}" ]; then
    consider "$PYTHON"
    echo "PYTHON=$PYTHON is not a Python >= 3.12 with the venv module." >&2
    exit 1
fi

pyenv_versions="${PYENV_ROOT:-$HOME/.pyenv}/versions"
for minor in 12 13; do
    consider "python3.$minor"
done
consider python3
for minor in 12 13; do
    for candidate in "$pyenv_versions/3.$minor"*/bin/python; do
        consider "$candidate"
    done
done
consider python3.14
for candidate in "$pyenv_versions/3.14"*/bin/python; do
    consider "$candidate"
done

cat >&2 <<EOM
No Python >= 3.12 with the venv module was found: not on PATH (python3.12, python3.13, python3,
python3.14) and not under $pyenv_versions.
Megatron needs one. Get it with one of:
    pyenv install 3.12
    sudo apt-get install python3.12 python3.12-venv      (Ubuntu 24.04)
    conda create -n py312 python=3.12 && conda activate py312
or name one that is elsewhere: make install PYTHON=/path/to/python3.12
EOM
exit 1
