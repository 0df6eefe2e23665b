#!/usr/bin/env bash
# Installs programs that some tests need and are skipped without: Chromium for pages, systemd-nspawn for units, Prometheus
# and promtool for metrics and alerts.
# For root on Debian; elsewhere it does nothing.
set -euo pipefail
[ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || exit 0
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
command -v chromium > /dev/null || apt-get -qq install -y --no-install-recommends chromium
command -v systemd-nspawn > /dev/null || apt-get -qq install -y --no-install-recommends systemd-container
command -v prometheus > /dev/null && command -v promtool > /dev/null && exit 0
unpacked=$(mktemp -d)
trap 'rm -r "$unpacked"' EXIT
# The package would start a server.
cd "$unpacked"
apt-get -qq download prometheus
dpkg -x prometheus_*.deb .
install usr/bin/prometheus usr/bin/promtool /usr/local/bin
