# Sourced by the tools: makes .venv in the project's folder and keeps what is installed in it current.
# The interpreter that makes it is $PYTHON, else python3.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"

fail() {
    echo "${0##*/}: $1" >&2
    exit "${2:-1}"
}

# Two tools started side by side must not install into one .venv at the same time.
lock_venv() {
    command -v flock >/dev/null 2>&1 || return 0
    exec 9<"$ROOT/setup.cfg"
    flock 9
}

unlock_venv() {
    exec 9<&-
}

make_venv() {
    local python="${PYTHON:-python3}" found
    if "$VENV/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        return
    fi
    command -v "$python" >/dev/null 2>&1 || fail "needs Python 3.11 or newer, but there is no '$python' on PATH (set PYTHON)"
    found="$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)" || fail "'$python' does not run"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "needs Python 3.11 or newer, but '$python' is $found (set PYTHON to a newer one)"
    echo "making $VENV with Python $found" >&2
    "$python" -m venv --clear "$VENV" >&2 || fail "'$python -m venv' failed (on Debian and Ubuntu: install python3-venv)"
}

# install_project [EXTRAS]: an editable install, repeated only when what it depends on has changed.
install_project() {
    local extras="${1:-}" stamp="$VENV/.zmqueue-installed" want
    # The folder is part of it: an editable install points to where the project stood.
    want="$ROOT $(cat "$ROOT/setup.cfg" "$ROOT/pyproject.toml" | cksum)"
    if [ -f "$stamp" ]; then
        # What was installed with the dev extra serves without it as well.
        case "$(cat "$stamp")" in
            "$want [$extras]" | "$want [dev]") return ;;
        esac
    fi
    echo "installing zmqueue${extras:+ with extra '$extras'} into $VENV" >&2
    rm -f "$stamp"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$ROOT${extras:+[$extras]}" >&2 ||
        fail "the installation failed, see above"
    echo "$want [$extras]" >"$stamp"
}
