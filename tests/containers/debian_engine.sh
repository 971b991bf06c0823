#!/usr/bin/env bash
# A container engine for a Debian machine that has none and reaches no image registry:
#   debian_engine.sh start DIR      prints what to export
#   debian_engine.sh stop DIR
# The engine is the distribution's, Compose comes from Debian 13's package (Debian 12 has only the
# old one). The base images are stand-ins made from Debian packages under the real ones' names, so
# the committed Dockerfiles build unchanged.
set -euo pipefail
action=$1
dir=$2

start() {
  mkdir -p "$dir"
  cd "$dir"
  export DOCKER_CONFIG=$dir/config DOCKER_HOST=unix://$dir/docker.sock
  if ! command -v dockerd >/dev/null || ! command -v debootstrap >/dev/null || ! command -v iptables >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io iptables debootstrap
  fi
  newer_packages
  mkdir -p config/cli-plugins
  cp unpacked/usr/libexec/docker/cli-plugins/docker-compose config/cli-plugins/
  docker info >/dev/null 2>&1 || (dockerd --data-root "$dir/data" --exec-root "$dir/exec" -H "$DOCKER_HOST" --pidfile "$dir/dockerd.pid" \
    >"$dir/dockerd.log" 2>&1 &)
  for _ in $(seq 150); do
    docker info >/dev/null 2>&1 && break
    sleep 0.2
  done
  docker info >/dev/null || { tail "$dir/dockerd.log"; exit 1; }
  base_image
  prometheus_image
}

# Compose and Prometheus of Debian 13, through an apt of our own: the machine's set-up stays as it is.
newer_packages() {
  [ -d unpacked ] && return
  local mirror
  mirror=$(awk '/^URIs:/{print $2; exit} /^deb /{print $2; exit}' /etc/apt/sources.list.d/*.sources /etc/apt/sources.list 2>/dev/null)
  mkdir -p apt/lists/partial apt/cache/archives/partial
  : >apt/status
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >apt/sources.list
  local options=(-qq -o Dir::State="$dir/apt" -o Dir::State::lists="$dir/apt/lists"
    -o Dir::State::status="$dir/apt/status" -o Dir::Cache="$dir/apt/cache"
    -o Dir::Etc::sourcelist="$dir/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  apt-get "${options[@]}" download docker-compose prometheus promtool
  mkdir unpacked
  for package in docker-compose_*.deb prometheus_*.deb promtool_*.deb; do dpkg -x "$package" unpacked; done
}

# Debian's own Python in the place of the image that the Dockerfiles name.
base_image() {
  local name
  name=$(sed -n 's/^FROM \(.*\) AS build/\1/p' "$repository/env_service/Dockerfile")
  docker image inspect "$name" >/dev/null 2>&1 && return
  debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm rootfs >debootstrap.log
  for alias in python python3; do ln -sf /usr/bin/python3 rootfs/usr/local/bin/$alias; done
  ln -sf /usr/bin/pip3 rootfs/usr/local/bin/pip
  rm -f rootfs/usr/lib/python3.11/EXTERNALLY-MANAGED rootfs/var/cache/apt/archives/*.deb
  cp /etc/ssl/certs/ca-certificates.crt rootfs/etc/ssl/certs/
  if [ -n "${PIP_FIND_LINKS:-}" ]; then  # wheels that this machine has of its own
    mkdir -p rootfs/srv/wheels
    cp "$PIP_FIND_LINKS"/*.whl rootfs/srv/wheels/
    printf '[global]\nfind-links = /srv/wheels\n' >rootfs/etc/pip.conf
  fi
  tar -C rootfs --exclude=./dev -c . | docker import --change 'CMD ["python3"]' --change 'ENV LANG=C.UTF-8' \
    --change 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' - "$name" >/dev/null
}

# Debian's Prometheus with the official image's layout.
prometheus_image() {
  local name base
  name=$(sed -n 's/.*PROMETHEUS_IMAGE:-\(.*\)}/\1/p' "$repository/docker-compose.yml")
  base=$(sed -n 's/^FROM \(.*\) AS build/\1/p' "$repository/env_service/Dockerfile")
  docker image inspect "$name" >/dev/null 2>&1 && return
  mkdir -p prometheus
  cp unpacked/usr/bin/prometheus unpacked/usr/bin/promtool prometheus/
  printf '%s\n' "FROM $base" 'COPY prometheus promtool /bin/' \
    'RUN install -d -o 65534 -g 65534 /prometheus' 'USER 65534' 'WORKDIR /prometheus' \
    'ENTRYPOINT ["/bin/prometheus"]' >prometheus/Dockerfile
  docker build -q -t "$name" prometheus >/dev/null
}

stop() {
  local pid
  [ -f "$dir/dockerd.pid" ] || return 0
  pid=$(cat "$dir/dockerd.pid")
  kill "$pid"
  while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
  # dockerd leaves its rules, its bridge and forwarding behind.
  iptables -P FORWARD ACCEPT
  iptables -F FORWARD
  iptables -t nat -F
  iptables -t nat -X
  local chains="DOCKER-USER DOCKER-ISOLATION-STAGE-1 DOCKER-ISOLATION-STAGE-2 DOCKER" chain
  for chain in $chains; do iptables -F "$chain" 2>/dev/null || true; done
  for chain in $chains; do iptables -X "$chain" 2>/dev/null || true; done
  ip link del docker0 2>/dev/null || true
  echo 0 >/proc/sys/net/ipv4/ip_forward
}

repository=$(cd "$(dirname "$0")/../.." && pwd)
"$action"
