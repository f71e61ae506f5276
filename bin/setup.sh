# Sourced by quickstart, test and bench, with $root set to the repository.
#
# ensure_environment [dev]: a virtual environment in $root/.venv with meshd's packages (dev: and those of its tests).
# Does nothing, and needs no network, when it is already there for this pyproject.toml.

python_of_choice() {
  for candidate in "${MESHD_PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  echo "meshd needs Python 3.11 or newer; found: $(python3 --version 2>&1 || echo none)." >&2
  echo "Install one (Debian: apt install python3 python3-venv), or set MESHD_PYTHON to it." >&2
  return 1
}

ensure_environment() {
  extra=${1:-run}
  stamp="$root/.venv/.meshd-$extra"
  wanted=$(cksum <"$root/pyproject.toml")
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$root/.venv/bin/python" -c '' 2>/dev/null; then
    return 0
  fi
  if ! "$root/.venv/bin/python" -c 'import pip' 2>/dev/null; then
    python=$(python_of_choice) || return 1
    echo "-- making the virtual environment .venv with $("$python" --version)"
    if ! "$python" -m venv --clear "$root/.venv"; then
      echo "python -m venv failed. On Debian and Ubuntu: apt install python3-venv; then run this again." >&2
      return 1
    fi
  fi
  what="."
  [ "$extra" = run ] || what=".[$extra]"
  echo "-- installing meshd and its packages (about a minute, once)"
  log="$root/.venv/install.log"
  if ! (cd "$root" && .venv/bin/python -m pip install --disable-pip-version-check -q -e "$what") >"$log" 2>&1; then
    cat "$log" >&2
    echo "The packages could not be installed. Is the package index reachable? Run this again when it is:" >&2
    echo "what is already installed is kept." >&2
    return 1
  fi
  echo "$wanted" >"$stamp"
}
