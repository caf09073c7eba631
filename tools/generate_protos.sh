#!/usr/bin/env bash
# Generate stubs from protos/ into tide/v1/. The generator is pinned: stubs of 1.72.2 load on protobuf 6.33 and 7.
# It needs an older protobuf than the project, so it has its own environment under build/.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
TOOLS=build/protos-venv
VERSION=1.72.2

if [ ! -x "$TOOLS/bin/python" ] || ! "$TOOLS/bin/python" -c "import grpc_tools" 2>/dev/null; then
  echo "protos: installing grpcio-tools $VERSION into $TOOLS"
  "$PYTHON" -m venv "$TOOLS"
  "$TOOLS/bin/pip" install -qq --disable-pip-version-check "grpcio-tools==$VERSION" "setuptools<81"
fi
echo "protos: generating tide/v1"
mkdir -p tide/v1
PATH="$PWD/$TOOLS/bin:$PATH" "$TOOLS/bin/python" -m grpc_tools.protoc -I protos \
  --python_out=. --pyi_out=. --grpc_python_out=. protos/tide/v1/tide.proto
