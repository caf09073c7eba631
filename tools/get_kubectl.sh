#!/usr/bin/env bash
# Download a kubectl for the tests of the manifests, without installing it: tools/get_kubectl.sh TARGET
#
# Debian 12's own is too old for the kustomizations, so the package of the next release is downloaded from the machine's
# mirror and unpacked. If that fails, the tests render the manifests themselves and report it.
set -euo pipefail
[[ $# -eq 1 ]] || { sed -n '2p' "$0" | cut -c3- >&2; exit 2; }
release=trixie target=$(realpath -m "$1")
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || { echo "no apt here" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists,archives,sources}
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
  [[ -f $file ]] && sed "s/bookworm/$release/g" "$file" >"$work/sources/${file##*/}"
done
apt() {
  apt-get -qq -o APT::Sandbox::User=root -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$work/sources" \
    -o Dir::State::lists="$work/lists" -o Dir::Cache="$work" -o Dir::Cache::archives="$work/archives" "$@"
}
cd "$work"
apt update && apt download kubectl && dpkg-deb -x kubectl_*.deb unpacked
unpacked/usr/bin/kubectl version --client >/dev/null
install -m 755 unpacked/usr/bin/kubectl "$target"
