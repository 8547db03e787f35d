#!/bin/bash
# The virtual machine's first process: makes a RoCE device of a network interface, runs the tests, powers off.
# HEADRACE_RDMA_HOST, from the kernel's command line: empty for a machine on its own, else its number among several.
mkdir -p /proc /sys /dev /tmp /run
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs tmp /tmp
mount -t tmpfs shm /dev/shm
exec </dev/ttyS0 >/dev/ttyS0 2>&1
ip link set lo up
# Jumbo frames where the network allows it: RoCE then sends 4,096 bytes a packet.
if [[ -n ${HEADRACE_RDMA_HOST:-} ]]; then
    modprobe -a virtio_pci virtio_net ib_uverbs rdma_rxe
    for ((tries = 0; tries < 100; tries++)); do
        interface=$(ls /sys/class/net | grep -v '^lo$' | head -n 1)
        [[ -n $interface ]] && break
        sleep 0.1
    done
    mtu=1500
else
    modprobe -a dummy ib_uverbs rdma_rxe
    interface=dummy0
    [[ -e /sys/class/net/dummy0 ]] || ip link add dummy0 type dummy
    mtu=4200
fi
ip address add "10.99.0.${HEADRACE_RDMA_HOST:-1}/24" dev "$interface"
ip link set "$interface" up mtu "$mtu"
rdma link add rxe0 type rxe netdev "$interface"
ulimit -l unlimited
cd /project || echo "the project is missing"
PYTHONPATH=/project:/project/libs:/opt/python
for service in services/*/; do PYTHONPATH+=:/project/${service%/}; done
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PYTHONPATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HOME=/tmp XDG_STATE_HOME=/tmp/state
read -r up_s _ </proc/uptime
echo "the machine is up after $up_s s"
python3 -m tests.rdma.guest
echo o >/proc/sysrq-trigger
sleep 30
