#!/usr/bin/env bash
# A Kubernetes cluster of two nodes on this machine, with the operators, built from Go modules: for tests, as root, on Debian.
#   kubernetes.sh build DIR          the binaries, into DIR/bin, once (a quarter of an hour on two cores)
#   kubernetes.sh load DIR IMAGE     an image of the Docker engine, before the start: both nodes have it then
#   kubernetes.sh start DIR          control plane, nodes, DNS, network policies, Training Operator, JobSet, Trainer (a minute)
#   kubernetes.sh add DIR IMAGE      an image of the Docker engine that has one layer more than the image loaded last
#   kubernetes.sh on DIR COMMAND...  within the cluster's network, with its kubeconfig: kubectl
#   kubernetes.sh api DIR up|down    end and start the API server
#   kubernetes.sh node DIR up|down   end node 2 as a loss of power does, and start it again
#   kubernetes.sh stop DIR           end all of it, by PID
# Each node lives in a network namespace of its own (muster-kube-1, muster-kube-2; node 1 with the control plane), with a wire
# between them, and its containerd and kubelet in a mount namespace, too: nothing on the host is changed but cgroups, which are
# removed with their pods. PIDs are in DIR/run/*.pid.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
action=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd)
shift 2
bin=$dir/bin run=$dir/run
pods=10.245 service=10.112.0 # the API server listens at the first address of the service range itself
dns=$pods.1.2                # the first pod of node 1: nothing routes to the addresses of services
processors=16                # of a node, whatever the machine has: pods that ask for one each have to find a place
net=muster-kube-1            # of the control plane
kube=1.34.4 operator=1.9.3 jobset=0.12.0 trainer=2.3.0 coredns=1.12.4 router=2.1.0
export CGO_ENABLED=0 GOFLAGS="-mod=mod -buildvcs=false" KUBECONFIG=$run/admin.kubeconfig

at() { # N COMMAND...: of node N
  local n=$1 net=muster-kube-$1 node=muster-node-$1 subnet=$pods.$1 home=$run/node-$1 root=$dir/containerd-$1
  shift
  "$@"
}
both() { at 1 "$@" && at 2 "$@"; }
within() { nsenter --net="/run/netns/$net" "$@"; } # and not `ip netns exec`: it hides /sys/fs/cgroup
on() { within env PATH="$bin:$PATH" "$@"; }
kubectl() { on kubectl "$@"; }
until_true() { # SECONDS COMMAND...
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    if ((SECONDS > end)); then
      echo "not within the time: $*" >&2
      return 1
    fi
    sleep 0.5
  done
}
begin() { # NAME COMMAND...: in the background, its PID and its log by its name
  local name=$1
  shift
  setsid nohup nsenter --net="/run/netns/$net" "$@" >"$run/log/$name" 2>&1 </dev/null 9>&- &
  echo $! >"$run/$name.pid"
}
end() { # NAME
  local pid
  pid=$(cat "$run/$1.pid" 2>/dev/null) || return 0
  kill "$pid" 2>/dev/null || true
  for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.2; done
  kill -9 "$pid" 2>/dev/null || true
  rm -f "$run/$1.pid"
}

# ---- build ----

tools() { # Debian has these
  if ! command -v containerd || ! command -v runc || ! [ -x /usr/lib/cni/bridge ] || ! command -v ipset || ! command -v gcc; then
    "$here/apt.sh" install containerd runc containernetworking-plugins iproute2 iptables ipset procps gcc libc6-dev openssl ca-certificates
  fi
  [ -x "$bin/etcd" ] || {
    "$here/apt.sh" unpack "$dir/etcd" etcd-server
    cp "$dir/etcd/usr/bin/etcd" "$bin/etcd"
    rm -rf "$dir/etcd"
  }
}
made() { # NAME PACKAGE: in the module where we stand
  [ -x "$bin/$1" ] || { SECONDS=0 && go build -trimpath -ldflags "${flags:--s -w}" -o "$bin/$1.new" "$2" && mv "$bin/$1.new" "$bin/$1" && echo "$1 ${SECONDS} s"; }
}
build_kube() { # its staging modules are published under a version of their own
  local name flags=""
  mkdir -p "$dir/src/kube"
  cd "$dir/src/kube"
  [ -f go.mod ] || {
    go mod init kube
    go mod edit -go=1.24.0 -require "k8s.io/kubernetes@v$kube"
    go mod download -json "k8s.io/kubernetes@v$kube" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p' >module
    grep -oE 'k8s.io/[a-z-]+ v0.0.0$' "$(cat module)" | cut -d' ' -f1 | sort -u | while read -r name; do
      go mod edit -replace "$name=$name@v0.${kube#1.}"
    done
  }
  flags="-s -w -X k8s.io/component-base/version.gitVersion=v$kube -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=34"
  for name in kube-apiserver kubelet kube-controller-manager kube-scheduler kubectl; do made "$name" "k8s.io/kubernetes/cmd/$name"; done
}
build_policies() { # what enforces NetworkPolicy in kube-router, without its routes and services; with the packages of kubelet
  mkdir -p "$dir/src/kube/policies"
  cd "$dir/src/kube"
  cat >policies/main.go <<'GO'
package main

import (
	"os"
	"sync"

	"github.com/cloudnativelabs/kube-router/v2/pkg/controllers/netpol"
	"github.com/cloudnativelabs/kube-router/v2/pkg/healthcheck"
	"github.com/cloudnativelabs/kube-router/v2/pkg/options"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func main() { // NODE SERVICES
	config := options.NewKubeRouterConfig()
	config.HostnameOverride, config.ClusterIPCIDRs, config.EnableIPv4 = os.Args[1], os.Args[2:], true
	client := kubernetes.NewForConfigOrDie(must(clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))))
	stop, beats := make(chan struct{}), make(chan *healthcheck.ControllerHeartbeat, 10)
	factory := informers.NewSharedInformerFactory(client, 0)
	pods, spaces := factory.Core().V1().Pods().Informer(), factory.Core().V1().Namespaces().Informer()
	policies := factory.Networking().V1().NetworkPolicies().Informer()
	factory.Start(stop)
	factory.WaitForCacheSync(stop)
	tables, sets, err := netpol.NewIPTablesHandlers(config)
	must(tables, err)
	controller := must(netpol.NewNetworkPolicyController(client, config, pods, policies, spaces, &sync.Mutex{}, tables, sets))
	must(pods.AddEventHandler(controller.PodEventHandler))
	must(spaces.AddEventHandler(controller.NamespaceEventHandler))
	must(policies.AddEventHandler(controller.NetworkPolicyEventHandler))
	go func() {
		for range beats { // of a health check that nobody asks for
		}
	}()
	var running sync.WaitGroup
	running.Add(1)
	controller.Run(beats, stop, &running)
}
GO
  go mod edit -require "github.com/cloudnativelabs/kube-router/v2@v$router"
  made policies ./policies
}
build_dns() { # CoreDNS with the plugins that a cluster's own names need
  mkdir -p "$dir/src/coredns"
  cd "$dir/src/coredns"
  cat >main.go <<'GO'
package main

import (
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
)

func init() { dnsserver.Directives = []string{"errors", "kubernetes"} }

func main() { coremain.Run() }
GO
  [ -f go.mod ] || { go mod init coredns && go mod edit -go=1.24.0 -require "github.com/coredns/coredns@v$coredns"; }
  made coredns .
}
module() { # MODULE@VERSION: where its files are
  go mod download -json "$1" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p'
}
build_operator() { # NAME MODULE@VERSION PACKAGE: in a writable copy of its module, with the versions that it names
  [ -d "$dir/src/$1" ] || { cp -r "$(module "$2")" "$dir/src/$1" && chmod -R u+w "$dir/src/$1"; }
  cd "$dir/src/$1"
  made "$1" "$3"
}
build() { # for one caller at a time: whoever comes second finds it done
  mkdir -p "$bin" "$dir/src"
  exec 8>"$dir/build.lock"
  flock 8
  tools
  build_kube
  build_policies
  build_dns
  build_operator training-operator "github.com/kubeflow/training-operator@v$operator" ./cmd/training-operator.v1
  build_operator jobset "sigs.k8s.io/jobset@v$jobset" .
  build_operator trainer "github.com/kubeflow/trainer/v2@v$trainer" ./cmd/trainer-controller-manager
  [ -x "$bin/pause" ] || { echo 'int pause(void); int main(void) { for (;;) pause(); }' | gcc -x c -Os -static -s -o "$bin/pause" -; }
}

# ---- start ----

issue() { # NAME SUBJECT USAGE [SAN]: a certificate of the cluster's own authority
  openssl req -newkey rsa:2048 -nodes -keyout "$1.key" -out "$1.csr" -subj "$2"
  printf 'keyUsage=digitalSignature,keyEncipherment\nextendedKeyUsage=%s\n%s\n' "$3" "${4:+subjectAltName=$4}" >"$1.ext"
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out "$1.crt" -extfile "$1.ext"
}
kubeconfig() { # NAME
  cat >"$run/$1.kubeconfig" <<YAML
apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "https://$service.1:443", certificate-authority: $run/pki/ca.crt}}]
users: [{name: $1, user: {client-certificate: $run/pki/$1.crt, client-key: $run/pki/$1.key}}]
contexts: [{name: test, context: {cluster: test, user: $1}}]
current-context: test
YAML
}
certificates() {
  mkdir -p "$run/pki"
  cd "$run/pki"
  openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 30 -subj /CN=muster-test
  openssl genrsa -out sa.key 2048
  issue apiserver /CN=kube-apiserver serverAuth "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local,IP:$service.1,IP:127.0.0.1"
  issue to-kubelet /O=system:masters/CN=to-kubelet clientAuth
  issue admin /O=system:masters/CN=admin clientAuth
  issue controllers /CN=system:kube-controller-manager clientAuth
  issue scheduler /CN=system:kube-scheduler clientAuth
  both certificate
  for name in admin node-1 node-2 controllers scheduler; do kubeconfig "$name"; done
}
certificate() {
  issue "kubelet-$n" "/CN=$node" serverAuth "DNS:$node,IP:$subnet.1"
  issue "node-$n" "/O=system:nodes/CN=system:node:$node" clientAuth
}
network() { # the pods' bridge; the host's own network is not touched
  ip netns add "$net"
  ip -n "$net" link set lo up
  ip -n "$net" link add cni0 type bridge
  ip -n "$net" addr add "$subnet.1/24" dev cni0
  ip -n "$net" link set cni0 up
  # Pods of one node meet on its bridge: policies are for their packets, too.
  within sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward && echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables'
}
networks() {
  both network
  ip -n muster-kube-1 addr add "$service.1/32" dev cni0
  ip -n muster-kube-1 link add wire type veth peer name wire netns muster-kube-2
  both connect
}
connect() { # to the other node
  ip -n "$net" addr replace "$pods.0.$n/24" dev wire
  ip -n "$net" link set wire up
  ip -n "$net" route replace "$pods.$((3 - n)).0/24" via "$pods.0.$((3 - n))"
  [ "$n" = 1 ] || ip -n "$net" route replace "$service.0/24" via "$pods.0.1"
}
configure() {
  mkdir -p "$run/log" "$home"/{cni,kubelet,pods,volumes,sysctl}
  cat >"$home/cni/10-bridge.conflist" <<JSON
{"cniVersion": "0.4.0", "name": "muster", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
 "ipam": {"type": "host-local", "dataDir": "$home/ipam", "ranges": [[{"subnet": "$subnet.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
JSON
  cat >"$home/containerd.toml" <<TOML
version = 2
root = "$root"
state = "$home/containerd"
[grpc]
  address = "$home/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "$home/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "muster.local/pause:1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  disable_tcp_service = true
  stream_server_address = "127.0.0.1"
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$home/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
TOML
  cat >"$home/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $subnet.1
port: 10250
healthzPort: 0
tlsCertFile: $run/pki/kubelet-$n.crt
tlsPrivateKeyFile: $run/pki/kubelet-$n.key
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $run/pki/ca.crt}}
authorization: {mode: Webhook}
containerRuntimeEndpoint: unix://$home/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: /
cgroupsPerQOS: false
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
makeIPTablesUtilChains: false
clusterDNS: [$dns]
clusterDomain: cluster.local
resolvConf: $home/resolv.conf
imageGCHighThresholdPercent: 100
imageMinimumGCAge: 240h
evictionHard: {memory.available: 0%} # never: others use this memory and this disk, too
podLogsDir: $home/pods
volumePluginDir: $home/plugins
YAML
  echo "nameserver $dns" >"$home/resolv.conf"
  for ((core = 0; core < processors; core++)); do # what kubelet counts
    mkdir -p "$home/processors/cpu$core"/{cache,topology}
    echo "$core" >"$home/processors/cpu$core/topology/core_id"
    echo 0 >"$home/processors/cpu$core/topology/physical_package_id"
  done
  echo "0-$((processors - 1))" >"$home/processors/online"
}
api() {
  begin apiserver "$bin/kube-apiserver" --etcd-servers=http://127.0.0.1:23790 --bind-address="$service.1" --secure-port=443 \
    --advertise-address="$service.1" --service-cluster-ip-range="$service.0/24" --tls-cert-file="$run/pki/apiserver.crt" \
    --tls-private-key-file="$run/pki/apiserver.key" --client-ca-file="$run/pki/ca.crt" \
    --kubelet-client-certificate="$run/pki/to-kubelet.crt" --kubelet-client-key="$run/pki/to-kubelet.key" \
    --kubelet-certificate-authority="$run/pki/ca.crt" --kubelet-preferred-address-types=InternalIP \
    --service-account-issuer=https://kubernetes.default.svc.cluster.local --service-account-key-file="$run/pki/sa.key" \
    --service-account-signing-key-file="$run/pki/sa.key" --authorization-mode=Node,RBAC --allow-privileged=true \
    --enable-admission-plugins=NodeRestriction --enable-aggregator-routing=true
  until_true 90 kubectl get --raw=/readyz
}
control_plane() {
  begin etcd "$bin/etcd" --data-dir "$run/etcd" --unsafe-no-fsync --listen-client-urls http://127.0.0.1:23790 \
    --advertise-client-urls http://127.0.0.1:23790 --listen-peer-urls http://127.0.0.1:23800 \
    --initial-advertise-peer-urls http://127.0.0.1:23800 --initial-cluster default=http://127.0.0.1:23800
  api
  begin controllers "$bin/kube-controller-manager" --kubeconfig="$run/controllers.kubeconfig" \
    --authentication-kubeconfig="$run/controllers.kubeconfig" --authorization-kubeconfig="$run/controllers.kubeconfig" \
    --service-account-private-key-file="$run/pki/sa.key" --root-ca-file="$run/pki/ca.crt" --use-service-account-credentials=true \
    --leader-elect=false --bind-address=127.0.0.1 --secure-port=16257 --cert-dir="$run/pki/controllers" \
    --node-monitor-grace-period=20s # and not 50: a test waits for it
  begin scheduler "$bin/kube-scheduler" --kubeconfig="$run/scheduler.kubeconfig" \
    --authentication-kubeconfig="$run/scheduler.kubeconfig" --authorization-kubeconfig="$run/scheduler.kubeconfig" \
    --leader-elect=false --bind-address=127.0.0.1 --secure-port=16259 --cert-dir="$run/pki/scheduler"
}
machine() { # containerd and kubelet in a mount namespace of their own: the sysctls that kubelet wants are set there, and it has processors
  # shellcheck disable=SC2016
  begin "machine-$n" unshare -m --propagation=private bash -c '
    set -eu
    run=$1 bin=$2 home=$3 n=$4 node=$5 ip=$6
    mount --make-rshared /
    while read -r name value; do
      echo "$value" >"$home/sysctl/${name//\//.}"
      mount --bind "$home/sysctl/${name//\//.}" "/proc/sys/$name"
    done <<SYSCTL
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
SYSCTL
    mkdir -p "$home/none"
    [ ! -d /sys/devices/system/node ] || mount --bind "$home/none" /sys/devices/system/node
    mount --bind "$home/processors" /sys/devices/system/cpu
    containerd --config "$home/containerd.toml" >"$run/log/containerd-$n" 2>&1 &
    echo $! >"$run/containerd-$n.pid"
    until [ -S "$home/containerd.sock" ]; do sleep 0.2; done
    "$bin/kubelet" --kubeconfig="$run/node-$n.kubeconfig" --config="$home/kubelet.yaml" --hostname-override="$node" --node-ip="$ip" \
      --root-dir="$home/kubelet" --cert-dir="$home/pki" --v=2 >"$run/log/kubelet-$n" 2>&1 &
    echo $! >"$run/kubelet-$n.pid"
    wait' _ "$run" "$bin" "$home" "$n" "$node" "$subnet.1"
  until_true 60 images ls
}
containers() { ctr --address "$home/containerd.sock" --namespace k8s.io "$@"; }
images() { containers images "$@"; }
image() { # NAME BINARY PATH: an image of one static binary
  python3 "$here/image.py" "$1" "$2" "$3" | images import -
}
load() { # NAME, unless it is there already: 3 GB take two minutes
  local id
  id=$(docker image inspect --format '{{.Id}}' "$1")
  [ "$(cat "$root/loaded" 2>/dev/null)" != "$id" ] || return 0
  configure
  unshare -m containerd --config "$home/containerd.toml" >"$run/log/load" 2>&1 &
  echo $! >"$run/load.pid"
  until_true 60 images ls
  docker save "$1" | images import -
  containers content ls | awk '$2 ~ /GB$/ {print $1}' | while read -r blob; do containers content rm "$blob"; done # it is unpacked
  end load
  echo "$id" >"$root/loaded"
}
copy() { # node 1's images to node 2, as hard links: nobody writes to a layer, only to the data bases
  rm -rf "$dir/containerd-2"
  mkdir -p "$dir/containerd-1"
  cp -al "$dir/containerd-1" "$dir/containerd-2"
  cd "$dir/containerd-1"
  find . -name '*.db' -exec cp --parents --remove-destination {} "$dir/containerd-2" \;
}
add() { # NAME: in a second, as the layers below it are unpacked already
  docker image inspect "$1" | python3 "$here/image.py" "$1" | images import -
}
again() { until_true 120 "$@"; } # a webhook is not there at once, and may time out under load
patient() { # NAMESPACE FOLDER: for a busy machine, where who answers late has not failed
  kubectl create namespace "$1"
  # Without a request, the operator has 2 shares of the processor where each pod of a test has 1024, and its webhook times out.
  kubectl -n "$1" apply -f - <<<'{"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "processor"},
    "spec": {"limits": [{"type": "Container", "defaultRequest": {"cpu": "1"}}]}}'
  shift
  kubectl kustomize "$dir/src/$1" 2>/dev/null | sed -E \
    -e 's/leaderElect: true/leaderElect: false/' -e 's/periodSeconds: 20$/periodSeconds: 600/' -e '/^ +cpu: /d' \
    -e 's/^( *)failurePolicy: Fail$/&\n\1timeoutSeconds: 30/' >"$run/operator.yaml"
  again kubectl apply --server-side -f "$run/operator.yaml"
}
operators() {
  local manager
  at 1 image "ghcr.io/kubeflow/training-v1/training-operator:v1-d6eb98e" "$bin/training-operator" /manager
  at 1 image "us-central1-docker.pkg.dev/k8s-staging-images/jobset/jobset:v$jobset" "$bin/jobset" /manager
  at 1 image "ghcr.io/kubeflow/trainer/trainer-controller-manager:v$trainer" "$bin/trainer" /manager
  sed -i '/third-party\/jobset/d' "$dir/src/trainer/manifests/overlays/manager/kustomization.yaml" # it is here already
  manager=$dir/src/trainer/manifests/base/manager # its Service is headless here, as nothing routes to the addresses of services
  grep -q feature-gates "$manager/manager_config_patch.yaml" ||
    sed -i -E 's/^( *)- --zap-log-level=2$/&\n\1- --feature-gates=TrainJobStatus=true/' "$manager/manager_config_patch.yaml"
  grep -q clusterIP "$manager/manager.yaml" || sed -i 's/^  ports:$/  clusterIP: None\n&/' "$manager/manager.yaml"
  patient kubeflow training-operator/manifests/overlays/standalone
  patient jobset-system jobset/config/default
  patient kubeflow-system trainer/manifests/overlays/manager
  kubectl -n kubeflow wait --for=condition=Available deployment/training-operator --timeout=180s
  kubectl -n jobset-system wait --for=condition=Available deployment/jobset-controller-manager --timeout=180s
  kubectl -n kubeflow-system wait --for=condition=Available deployment/kubeflow-trainer-controller-manager --timeout=180s
}
ready() {
  kubectl wait --for=create "node/$node" --timeout=60s
  kubectl wait --for=condition=Ready "node/$node" --timeout=120s
  begin "policies-$n" "$bin/policies" "$node" "$service.0/24"
}
resolver() { # CoreDNS in a pod, as the policies speak of pods
  image muster.local/coredns:1 "$bin/coredns" /coredns
  printf '.:53 {\n  errors\n  kubernetes cluster.local {\n    kubeconfig %s\n    pods insecure\n  }\n}\n' "$KUBECONFIG" >"$run/Corefile"
  again kubectl apply -f - <<YAML
apiVersion: v1
kind: Pod
metadata: {name: coredns, namespace: kube-system}
spec:
  nodeName: $node
  dnsPolicy: Default
  containers:
    - {name: coredns, image: "muster.local/coredns:1", args: [-conf, $run/Corefile], securityContext: {runAsUser: 0},
       volumeMounts: [{name: run, mountPath: $run, readOnly: true}]}
  volumes: [{name: run, hostPath: {path: $run}}]
YAML
  kubectl -n kube-system wait pod/coredns --for="jsonpath={.status.podIP}=$dns" --timeout=60s
}
start() {
  rm -rf "$run"
  mkdir -p "$run/log"
  networks
  certificates >"$run/log/certificates" 2>&1
  both configure
  control_plane
  copy
  both machine
  both image muster.local/pause:1 "$bin/pause" /pause
  both ready
  kubectl cordon muster-node-2 # whom a test may end: without the operators
  at 1 resolver
  operators
  kubectl uncordon muster-node-2
}
down() { # no goodbye of kubelet or pods, and nothing more over the wire
  local state=$home/containerd/io.containerd.runtime.v2.task/k8s.io
  ip -n "$net" link set wire down
  ls "$state" >"$home/lost"
  # Containers are in mount namespaces of their own.
  { pgrep --ns "$(cat "$run/machine-$n.pid")" --nslist mnt . && awk 1 "$run/policies-$n.pid" "$state"/*/init.pid; } | xargs kill -9
}
up() {
  local id
  while read -r id; do find /sys/fs/cgroup -depth -type d -name "$id" -exec rmdir {} +; done <"$home/lost"
  rm -rf "$home/containerd" "$home/containerd.sock" # as a boot empties /run
  connect
  # Otherwise it may still be Ready, of before.
  kubectl patch node "$node" --subresource=status -p '{"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}'
  machine
  ready
}
stop() {
  if [ -f "$run/apiserver.pid" ]; then
    timeout 60 "$0" on "$dir" kubectl delete namespace -l muster-test --wait=false || true
    timeout 60 "$0" on "$dir" kubectl delete deployments -A --all --wait=false || true
    timeout 90 "$0" on "$dir" kubectl delete pods -A --all --grace-period=5 --timeout=60s || true
  fi
  for name in {policies,kubelet,containerd,machine}-{1,2} load scheduler controllers apiserver etcd; do end "$name"; done
  ip netns del muster-kube-1 2>/dev/null || true
  ip netns del muster-kube-2 2>/dev/null || true
  rm -rf "$run"
}

case $action in
build) build ;;
start) start ;;
load) at 1 load "$1" ;;
add) both add "$1" ;;
on) on "$@" ;;
api) if [ "$1" = up ]; then api; else end apiserver; fi ;;
node) at 2 "$1" ;;
stop) stop ;;
*)
  echo "usage: kubernetes.sh build|load|start|add|on|api|node|stop DIR ..." >&2
  exit 2
  ;;
esac
