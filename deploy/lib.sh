# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# What quickstart and test share: installing what is missing, and building. Sourced, with `set -euo pipefail` in force.

say() { printf '%s\n' "== $*" >&2; }
die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# missing_packages serve|tests: prints the Debian packages for what this machine lacks to build and serve, or to test as well.
missing_packages() {
    command -v cc >/dev/null || echo build-essential
    [ "$1" != tests ] || command -v c++ >/dev/null || echo build-essential # the emulated device is C++
    command -v meson >/dev/null || echo meson
    command -v ninja >/dev/null || echo ninja-build
    command -v curl >/dev/null || echo curl
    command -v python3 >/dev/null || echo python3
    python3 -c 'import numpy' 2>/dev/null || echo python3-numpy
    if ! command -v pkg-config >/dev/null; then
        echo pkg-config libmicrohttpd-dev libjansson-dev libpcre2-dev
        [ "$1" != tests ] || echo libcmocka-dev
        return 0
    fi
    pkg-config --exists libmicrohttpd || echo libmicrohttpd-dev
    pkg-config --exists jansson || echo libjansson-dev
    pkg-config --exists libpcre2-8 || echo libpcre2-dev
    [ "$1" != tests ] || pkg-config --exists cmocka || echo libcmocka-dev
}

# install_missing serve|tests
install_missing() {
    local packages
    mapfile -t packages < <(missing_packages "$@" | tr ' ' '\n')
    [ "${#packages[@]}" -gt 0 ] || return 0
    command -v apt-get >/dev/null || die "missing ${packages[*]} (names of Debian packages), and there is no apt-get to install them"
    local as_root=()
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || die "run as root, or install: ${packages[*]}"
        as_root=(sudo -n)
        if ! sudo -n true 2>/dev/null; then
            [ -t 0 ] || die "sudo asks for a password; run as root, or install: ${packages[*]}"
            as_root=(sudo)
        fi
    fi
    say "installing ${packages[*]}"
    local log
    log=$(mktemp "${TMPDIR:-/tmp}/expertd-apt.XXXXXX")
    if ! { "${as_root[@]}" apt-get update &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"; } </dev/null >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        die "apt-get failed, as above; all it said is in $log"
    fi
    rm -f "$log"
}

# suites: the names that tests can be picked by, as the build's files have them.
suites() { grep -rhoE --include=meson.build "suite: '[a-z]+'" "$top/tests" | cut -d "'" -f 2 | sort -u; }

has_nvcc() { command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; }

# configure DIR OPTION...: a build folder that works, whatever was there before.
configure() {
    local dir=$1
    shift
    if [ -f "$dir/build.ninja" ] && grep -qF "\"source\": \"$top\"" "$dir/meson-info/meson-info.json" 2>/dev/null; then
        [ $# = 0 ] || meson configure "$dir" "$@" >&2
        return
    fi
    [ ! -e "$dir/meson-private" ] || rm -rf "$dir" # left by another clone or a failed attempt
    meson setup "$dir" "$top" "$@" >&2
}
