# Sourced by the other scripts, in the project's folder: sets up .venv and puts it on PATH.

# Without bytecode, every process of pytest compiles all tests and packages again: two thirds of the time
# that it takes to collect the tests.
unset PYTHONDONTWRITEBYTECODE

# Prints a Python >= 3.11 that can create virtual environments; prefers 3.11, the tested version.
find_python() {
    for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13 python3.14 python; do
        if [ -n "$candidate" ] && "$candidate" -c \
            'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python >= 3.11 with venv and pip was found; install one or set PYTHON to it." >&2
    return 1
}

# Prints the newest Python with wheels of all that ortops needs, also one that pyenv does not activate.
newest_python() {
    for minor in 14 13 12 11; do
        for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor."*/bin/python
        do
            if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
                echo "$candidate"
                return
            fi
        done
    done
    find_python
}

# Prints the time that this shell and what it started took: seconds since it started, and CPU-seconds.
say_time() {
    spent=$(mktemp) && times >"$spent"
    awk -v name="$1" -v since="$(($(date +%s) - ${STARTED:-0}))" '
        { gsub(/[ms]/, " "); total += $1 * 60 + $2 + $3 * 60 + $4 }
        END { printf "%s: %d seconds, %d CPU-seconds\n", name, since, total }' "$spent"
    rm -f "$spent"
}
STARTED=$(date +%s)

# set_up_environment GROUPS: installs the project, editable, with these optional groups (a,b,c).
#
# .venv/fingerprint records the folder and pyproject.toml that the environment was created for. It is
# missing during an installation, so an interrupted installation is repeated.
set_up_environment() {
    fingerprint="$PWD $(cksum <pyproject.toml)"
    if ! { .venv/bin/python -c '' && [ "$(cat .venv/fingerprint)" = "$fingerprint" ]; } 2>/dev/null
    then
        python=$(find_python) || return
        echo "Creating .venv with $("$python" --version) ..." >&2
        rm -rf .venv
        "$python" -m venv .venv || return
    fi
    if [ ! -e ".venv/installed-$1" ]; then
        echo "Installing ortops[$1] into .venv ..." >&2
        rm -f .venv/fingerprint
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$1]" || return
        touch ".venv/installed-$1"
        echo "$fingerprint" >.venv/fingerprint
    fi
    PATH="$PWD/.venv/bin:$PATH"
}
