# Sourced by the executables beside it, with $self (the file of this folder that was run) and $module set.
# The Python is .venv's; without one MESHD_PYTHON, without that a python3 that has the packages.
repository=$(cd "$(dirname "$self")/.." && pwd -P) || exit 1
if [ -x "$repository/.venv/bin/python" ]; then
    python=$repository/.venv/bin/python
elif [ -n "${MESHD_PYTHON:-}" ]; then
    python=$MESHD_PYTHON
elif python3 -c 'import zmq, msgpack, pydantic, click' 2>/dev/null; then
    python=python3
else
    echo "meshd is not installed: $repository/.venv does not exist and python3 lacks meshd's packages." >&2
    echo "Run $repository/bin/quickstart, or set MESHD_PYTHON to a Python that has them." >&2
    exit 1
fi
PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
# -P: nothing is imported from the folder the caller happens to be in. -s: nothing from the user's own packages.
exec "$python" -P -s -m "$module" "$@"
