#!/usr/bin/env bash
# Run the stages of the Dockerfile without a container: build the wheel, install it into a clean prefix, then serve from
# there as a user who may write only to a temporary folder, and answer one request.
#
#   tools/image/rehearse.sh FOLDER CONFIG REQUEST [TORCH]
#
# FOLDER is new or empty, has a short path, and stays: wheels/, prefix/, tmp/, serve.log, answer.json. CONFIG is the Serve
# config; the port is read from it. REQUEST is a file with the body of a completion. TORCH, DEMO: see install.sh. As root the server
# runs as uid 1000 and root owns the prefix; for other users the prefix is made read-only.
set -euo pipefail
FOLDER=$(realpath -m "$1") CONFIG=$(realpath "$2") REQUEST=$(realpath "$3") TORCH=${4:-}
here=$(realpath "$(dirname "$0")") root=$(realpath "$(dirname "$0")/../..")
start_s=${START_S:-240}
say() { echo "rehearse: $*"; }
mkdir -p "$FOLDER/tmp" && chmod 755 "$FOLDER"
as=()
if [[ $(id -u) -eq 0 ]]; then
  chown 1000:1000 "$FOLDER/tmp"
  as=(setpriv --reuid 1000 --regid 1000 --clear-groups --no-new-privs)
fi
# An interpreter that this user can start, so not one in another user's home.
for candidate in "${PYTHON:-}" python3.11 python3.12 /usr/bin/python3.11 /usr/bin/python3.12; do
  path=$(command -v "$candidate") && "${as[@]}" "$path" -c 'import os, sys; os.execv(sys.executable, [sys.executable, "-c", ""])' \
    2>/dev/null && export PYTHON=$path && found=1 && break
done
[[ -n ${found:-} ]] || { say "no python3.11 or python3.12 that uid $("${as[@]}" id -u) may run"; exit 1; }

say "building the wheel"
TIDE_CUDA=${TIDE_CUDA:-OFF} "$here/build_wheel.sh" "$root" "$FOLDER/wheels"

say "installing into a clean prefix"
"$here/install.sh" "$FOLDER/wheels" "$root/deploy" "$FOLDER/prefix" ${TORCH:+"$TORCH"}
chmod -R a-w "$FOLDER/prefix"
if compgen -G "$FOLDER/prefix/bin/*[gc]++*" >/dev/null || [[ -e $FOLDER/prefix/bin/pip ]]; then
  say "a compiler or pip is in the prefix" && exit 1
fi

touch "$FOLDER/mark"
port=$("$FOLDER/prefix/bin/python" -B -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["http_options"]["port"])' "$CONFIG")

say "serving as $("${as[@]}" id -u) on port $port"
# A fresh environment: only the variables that a pod would have, the caller's settings of Ray, and a pod's /tmp in this
# folder.
cd "$FOLDER/tmp"
haproxy=$FOLDER/tmp/h # short: the paths of its sockets have a limit
mapfile -t ray < <(env | grep -E '^(RAY|REPORTER)_' || true)
setsid env -i "${ray[@]}" RAY_SERVE_HAPROXY_CONFIG_FILE_LOC="$haproxy/haproxy.cfg" \
  RAY_SERVE_HAPROXY_SOCKET_PATH="$haproxy/admin.sock" RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH="$haproxy/metrics.sock" \
  RAY_SERVE_HAPROXY_SERVER_STATE_BASE="$haproxy" RAY_SERVE_HAPROXY_SERVER_STATE_FILE="$haproxy/server-state" PATH="$FOLDER/prefix/bin:/usr/bin:/bin" HOME="$FOLDER/tmp" TMPDIR="$FOLDER/tmp" RAY_TMPDIR="$FOLDER/tmp" \
  HF_HOME="$FOLDER/tmp/huggingface" HF_HUB_OFFLINE=1 TIDE_CACHE_DIR="$FOLDER/tmp/cache" MPLCONFIGDIR="$FOLDER/tmp/matplotlib" \
  PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE="${RAY_AUTH_MODE:-disabled}" \
  RAY_SERVE_HAPROXY_BINARY_PATH="$FOLDER/prefix/bin/tide-haproxy" \
  "${as[@]}" "$FOLDER/prefix/bin/tide" serve "$CONFIG" >"$FOLDER/serve.log" 2>&1 &
server=$!
# Stop it as Kubernetes stops a pod; remaining processes of its session are killed.
stop() {
  kill -TERM "$server" 2>/dev/null || true
  timeout 40 tail --pid="$server" -f /dev/null || true
  pkill -KILL -s "$server" || true
}
trap stop EXIT
for _ in $(seq "$start_s"); do
  # KubeRay's probe.
  wget -q -T 2 -t 1 -O - "http://localhost:$port/-/healthz" 2>/dev/null | grep -q success && ready=1 && break
  kill -0 "$server" 2>/dev/null || break
  sleep 1
done
[[ -n ${ready:-} ]] || { tail -n 40 "$FOLDER/serve.log"; say "not healthy"; exit 1; }

say "asking"
# The probe succeeds as soon as the proxy knows the route; the request then waits for the first replica.
wget -nv -T "$start_s" -t 1 -O "$FOLDER/answer.json" --header "Content-Type: application/json" --post-file "$REQUEST" \
  "http://localhost:$port/v1/completions" || { tail -n 40 "$FOLDER/serve.log"; say "no answer"; exit 1; }
stop
trap - EXIT
written=$(find "$FOLDER/prefix" -newer "$FOLDER/mark" -not -type d | head)
[[ -z $written ]] || { say "written into the prefix: $written"; exit 1; }
say "answered: $(head -c 200 "$FOLDER/answer.json")"
