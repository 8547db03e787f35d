#!/bin/bash
# The virtual machine's first process: makes a RoCE device of a network interface, runs the tests, powers off.
# HEADRACE_RDMA_ROLE, from the kernel's command line, says what to do; host-1 and host-2 are two machines of one network.
mkdir -p /proc /sys /dev /tmp /run
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs tmp /tmp
mount -t tmpfs shm /dev/shm
exec </dev/ttyS0 >/dev/ttyS0 2>&1
ip link set lo up
case $HEADRACE_RDMA_ROLE in
    *host-*)
        number=${HEADRACE_RDMA_ROLE##*-}
        modprobe -a virtio_pci virtio_net ib_uverbs rdma_rxe
        # Only RDMA uses the second network, and only TCP the first: each one's counters speak for themselves.
        for ((tries = 0; tries < 300; tries++)); do
            [[ -e /sys/class/net/eth1 ]] && break
            sleep 0.1
        done
        ip address add "10.99.0.$number/24" dev eth0
        ip link set eth0 up
        interface=eth1 mtu=1500
        ip address add "10.98.0.$number/24" dev eth1
        ;;
    *)
        modprobe -a dummy ib_uverbs rdma_rxe
        interface=dummy0 mtu=4200
        [[ -e /sys/class/net/dummy0 ]] || ip link add dummy0 type dummy
        ip address add 10.99.0.1/24 dev dummy0
        ;;
esac
# Jumbo frames where the network allows it: RoCE then sends 4,096 bytes a packet.
ip link set "$interface" up mtu "$mtu"
rdma link add rxe0 type rxe netdev "$interface"
ulimit -l unlimited
cd /project || echo "the project is missing"
PYTHONPATH=/project:/project/libs:/opt/python
for service in services/*/; do PYTHONPATH+=:/project/${service%/}; done
# Folders of the host, by their names.
if [[ -n ${HEADRACE_RDMA_SHARES:-} ]]; then
    modprobe -a 9pnet_virtio 9p
    for share in ${HEADRACE_RDMA_SHARES//,/ }; do
        mkdir -p "/host/$share"
        mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=1048576 "$share" "/host/$share"
    done
    # vLLM runs lscpu in a shell.
    [[ -e /bin/sh ]] || ln -s bash /bin/sh
    # After the machine's own packages.
    PYTHONPATH+=:/host/packages
fi
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
# An emulated machine may stand still for longer than a real one that is well.
export HEADRACE_PING_TIMEOUT_S=60
export PYTHONPATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HOME=/tmp XDG_STATE_HOME=/tmp/state
# The host made them, so that the machines of one job share a key.
for service in REGISTRY ROUTER PREFILL DECODE; do
    export "HEADRACE_${service}_TOKEN_FILE=/credentials/${service,,}.token"
    export "HEADRACE_${service}_TOKEN_KEYS_FILE=/credentials/token_keys.pem"
done
export HEADRACE_TOKEN_FILE=/credentials/operator.token
read -r up_s _ </proc/uptime
echo "the machine is up after $up_s s"
python3 -m tests.rdma.guest
echo o >/proc/sysrq-trigger
sleep 30
