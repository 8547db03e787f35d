"""The Helm chart, as helm renders it: valid for Kubernetes, confined, and with settings that the services accept."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import chart_settings
from headrace_common.config import ServiceConfig
from headrace_common.process.settings import load_config
from headrace_decode.config import DecodeConfig
from headrace_planner_service.config import PlannerConfig
from headrace_prefill.config import PrefillConfig
from headrace_registry.config import RegistryConfig
from headrace_router.config import RouterConfig
from headrace_worker.config import BothConfig
from kube_tools import KUBERNETES_VERSIONS, VALIDATOR
from tests.component.chart.charts import (
    CHART,
    COMPONENTS,
    CUSTOM,
    EXAMPLES,
    NAMESPACE,
    RELEASE,
    Manifest,
    container_of,
    example,
    manifests,
    of_kind,
    require_helm,
    run_helm,
    template,
    values_file,
    workloads,
)
from tests.component.chart.custom import DEFINITIONS
from tests.unit.test_architecture import ROOT

NAMES = [path.stem for path in EXAMPLES]
TRIAL = ("--values", str(EXAMPLES[NAMES.index("trial")]))
CONFIGS: dict[str, type[ServiceConfig]] = {
    "registry": RegistryConfig,
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "worker": BothConfig,
    "planner": PlannerConfig,
}


@pytest.fixture(autouse=True)
def _helm() -> None:
    require_helm()


@pytest.fixture(scope="module")
def validator() -> Iterator[Any]:
    """kubernetes-validate, which reads each schema once."""
    sys.path.insert(0, str(VALIDATOR))
    try:
        from kubernetes_validate import utils
    finally:
        sys.path.remove(str(VALIDATOR))
    original = utils.schema_contents
    utils.schema_contents = lru_cache(maxsize=None)(original)
    yield utils
    utils.schema_contents = original


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_every_manifest_has_only_fields_of_its_kind(
    name: str, version: str, validator: Any
) -> None:
    for item in example(name):
        if (item["apiVersion"], item["kind"]) not in CUSTOM:
            validator.validate(item, version, strict=True)


def test_every_custom_resource_has_only_fields_of_its_definition() -> None:
    specs = {definition.resource: definition.strict_spec() for definition in DEFINITIONS}
    found = [(one["apiVersion"], one["kind"], one) for name in NAMES for one in example(name)]
    checked = set()
    for version, kind, item in found:
        if (version, kind) in CUSTOM:
            jsonschema.validate(item["spec"], specs[version, kind])
            checked.add((version, kind))
    # Each definition is of use.
    assert checked == CUSTOM


@pytest.mark.parametrize("name", NAMES)
def test_an_example_passes_helms_own_checks(name: str) -> None:
    done = run_helm("lint", "--strict", str(CHART), "--values", str(EXAMPLES[NAMES.index(name)]))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_object_is_in_the_namespace_and_names_are_unique(name: str) -> None:
    found = example(name)
    assert {item["metadata"]["namespace"] for item in found} == {NAMESPACE}
    names = [(item["kind"], item["metadata"]["name"]) for item in found]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", NAMES)
def test_every_pod_is_confined(name: str) -> None:
    for component, workload in workloads(example(name)).items():
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod.keys() & {"hostPID", "hostIPC", "hostNetwork", "initContainers"}
        context = container_of(workload)["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["privileged"] is False
        added = context["capabilities"].pop("add", [])
        assert added == (
            ["IPC_LOCK"] if name == "rdma" and component in ("prefill", "decode") else []
        )
        assert context["capabilities"] == {"drop": ["ALL"]}
        for volume in pod["volumes"]:
            kinds = volume.keys() - {"name"}
            assert kinds <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]
        writable = [
            mount["mountPath"]
            for mount in container_of(workload)["volumeMounts"]
            if not mount.get("readOnly")
        ]
        assert set(writable) <= {"/tmp", "/dev/shm"}


def secrets_of(workload: Manifest) -> set[str]:
    volumes = workload["spec"]["template"]["spec"]["volumes"]
    return {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}


def test_a_service_has_its_own_credentials_only() -> None:
    found = {name: secrets_of(item) for name, item in workloads(example("tokens")).items()}
    assert found == {
        "registry": {"headrace-registry", "metrics-keys", "etcd-tls", "etcd-password"},
        "router": {"headrace-router", "metrics-keys", "api-keys"},
        "prefill": {"headrace-prefill", "metrics-keys"},
        "decode": {"headrace-decode", "metrics-keys"},
        "worker": {"headrace-worker", "metrics-keys"},
        "planner": {"headrace-planner", "metrics-keys"},
    }
    # The key that Prometheus presents is not for the services.
    for item in workloads(example("tokens")).values():
        volumes = item["spec"]["template"]["spec"]["volumes"]
        (keys,) = (volume for volume in volumes if volume["name"] == "metrics-keys")
        assert keys["secret"]["items"] == [{"key": "metrics_keys", "path": "metrics_keys"}]


def config_of(name: str, component: str, folder: Path) -> ServiceConfig:
    """The settings that a pod of an example starts with, as the service reads them."""
    found = example(name)
    data = of_kind(found, "ConfigMap")[component]["data"]
    path = folder / f"{component}.toml"
    path.write_text(data["settings.toml"], encoding="utf-8")
    words = [
        word.replace("$(POD_IP)", "10.1.2.3")
        .replace("$(POD_NAME)", f"{RELEASE}-{component}-0")
        .replace("/etc/headrace/settings.toml", str(path))
        for word in container_of(workloads(found)[component])["args"]
    ]
    prefix = f"HEADRACE_{component.upper()}_"
    return load_config(CONFIGS[component], words, prog=component, env_prefix=prefix)


@pytest.mark.parametrize("name", NAMES)
def test_the_services_accept_their_settings(name: str, tmp_path: Path) -> None:
    found, of_hosts = workloads(example(name)), of_kind(example(name), "LeaderWorkerSet")
    planner = ["planner"] if name in ("tokens", "planner") else []
    assert {*found, *of_hosts} == {*COMPONENTS[:5], *planner}
    for component, workload in found.items():
        config = config_of(name, component, tmp_path)
        assert config.insecure is (name == "trial")
        grace = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        # The pod's end begins with preStop, of 5 s.
        assert grace >= config.drain_grace_s + 10
        if component != "registry":
            assert config.registry == f"headrace-registry.{NAMESPACE}.svc.cluster.local:7051"
        ports = {port["name"]: port["containerPort"] for port in container_of(workload)["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container_of(workload)[probe]["grpc"]["port"] == ports["health"]
        assert config.health_listen == f"0.0.0.0:{ports['health']}"
        assert config.internal_listen == f"0.0.0.0:{ports['internal']}"


def test_settings_of_values_reach_the_services_and_those_of_the_chart_are_refused(
    tmp_path: Path,
) -> None:
    given = {"settings": {"log_level": "debug"}, "decode": {"settings": {"max_num_seqs": 7}}}
    found = manifests(*TRIAL, "--values", values_file(tmp_path, given))
    maps = of_kind(found, "ConfigMap")
    texts = {name: tomllib.loads(maps[name]["data"]["settings.toml"]) for name in COMPONENTS[:5]}
    assert {name: text["log_level"] for name, text in texts.items()} == dict.fromkeys(
        texts, "debug"
    )
    assert [text.get("max_num_seqs") for text in texts.values()] == [None, None, None, 7, None]
    annotations = [
        workloads(one)["decode"]["spec"]["template"]["metadata"]["annotations"]
        for one in (found, example("trial"))
    ]
    # A changed setting replaces the pods.
    assert annotations[0] != annotations[1]
    wrong = {"decode": {"settings": {"internal_listen": "0.0.0.0:1"}}}
    done = template(*TRIAL, "--values", values_file(tmp_path, wrong))
    assert done.returncode
    assert "decode.settings.internal_listen: other values of the chart set" in done.stderr


@pytest.mark.parametrize(
    "flag, remedy",
    [
        ("registry.replicas=2", "several registries need one etcd"),
        ("metrics.enabled=true", "metrics.keysSecret"),
        ("registry.store.user=u", "a password needs TLS"),
        ("credentials.certManager.enabled=true", "set credentials.kind to tls"),
        ("prefill.hostNetwork=true", "network policies do not cover the host's network"),
        ("planner.mode=scale", "/planner/mode"),
        ("decode.replica=3", "replica"),
        ("router.replicas=0", "/router/replicas"),
        ("model.name=", "/model/name"),
        ("decode.settings.max_num_sequences=7", "max_num_sequences"),
        ("worker.settings.max_prompt=7", "max_prompt"),
        ("decode.settings.max_prompts=7", "max_prompts"),
        ("worker.hostNetwork=true", "network policies do not cover the host's network"),
        ("router.settings.max_num_seqs=7", "max_num_seqs"),
        ("settings.max_num_seqs=7", "max_num_seqs"),
        ("router.proxy.port=1", "port"),
    ],
)
def test_wrong_values_are_refused_by_name(flag: str, remedy: str) -> None:
    done = template(*TRIAL, "--set", flag)
    assert done.returncode
    assert remedy in done.stderr.replace("additional properties 'replica'", "replica")


def test_a_proxy_bounds_http2_before_a_router_that_only_it_reaches() -> None:
    found = manifests(*TRIAL, "--set", "router.proxy.enabled=true")
    data = of_kind(found, "ConfigMap")["router"]["data"]
    assert tomllib.loads(data["settings.toml"])["listen"] == "127.0.0.1:7060"
    assert data["envoy.yaml"].strip() == (ROOT / "docker" / "envoy.yaml").read_text().strip()
    router, proxy = workloads(found)["router"]["spec"]["template"]["spec"]["containers"]
    assert router["securityContext"] == proxy["securityContext"]
    assert [mount.get("readOnly") for mount in proxy["volumeMounts"]] == [True]
    # Each name of a port exists once.
    assert [port["name"] for port in proxy["ports"]] == ["grpc"]
    assert "grpc" not in {port["name"] for port in router["ports"]}
    done = template("--set", "router.proxy.enabled=true,credentials.kind=tls")
    assert "clients' TLS would end at the proxy" in done.stderr


def test_the_schema_has_the_names_of_all_settings() -> None:
    assert chart_settings.with_names(schema := chart_settings.SCHEMA.read_text()) == schema


def test_the_default_values_render_and_clients_need_keys() -> None:
    found = manifests()
    assert workloads(found)["registry"]["spec"]["replicas"] == 1
    text = of_kind(found, "ConfigMap")["router"]["data"]["settings.toml"]
    assert tomllib.loads(text)["api_keys_file"] == "/api-keys/api_keys"
    pod = workloads(found)["router"]["spec"]["template"]["spec"]
    secrets = {volume.get("secret", {}).get("secretName") for volume in pod["volumes"]}
    assert f"{RELEASE}-api-keys" in secrets
    etcd = manifests("--set", "registry.store.endpoints={etcd:2379}")
    assert workloads(etcd)["registry"]["spec"]["replicas"] == 2


def test_workers_of_both_roles_take_the_place_of_the_others() -> None:
    assert {
        name: item["spec"]["replicas"]
        for name, item in workloads(manifests(*TRIAL)).items()
        if name in ("prefill", "decode", "worker")
    } == {"prefill": 1, "decode": 1, "worker": 0}
    found = example("both-roles")
    replicas = {name: item["spec"]["replicas"] for name, item in workloads(found).items()}
    assert replicas == {"registry": 2, "router": 2, "prefill": 0, "decode": 0, "worker": 2}
    container = container_of(workloads(found)["worker"])
    assert container["image"].startswith("headrace/worker:")
    assert "--worker-id=$(POD_NAME)" in container["args"]
    text = of_kind(found, "ConfigMap")["worker"]["data"]["settings.toml"]
    assert tomllib.loads(text)["max_prompts"] == 8
    assert "worker" in of_kind(found, "PodDisruptionBudget")
    # What scales prefill and decode leaves these workers.
    scaled = manifests(
        "--values", str(EXAMPLES[NAMES.index("planner")]), "--set", "worker.replicas=3"
    )
    assert workloads(scaled)["worker"]["spec"]["replicas"] == 3


def test_a_worker_of_several_hosts_is_a_leader_worker_set() -> None:
    found = example("two-hosts")
    assert "decode" not in workloads(found)
    spec = of_kind(found, "LeaderWorkerSet")["decode"]["spec"]
    group = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], group["size"]) == (1, 2)
    one_host = manifests(
        *("--values", str(EXAMPLES[NAMES.index("two-hosts")])), "--set", "decode.hosts=1"
    )
    plain = deepcopy(workloads(one_host)["decode"]["spec"]["template"])
    container_of({"spec": {"template": plain}})["args"].append(
        "--engine-args=--enable-expert-parallel --nnodes 2 --node-rank $(LWS_WORKER_INDEX) "
        "--master-addr $(LWS_LEADER_ADDRESS)"
    )
    assert group["leaderTemplate"] == plain
    # The other hosts serve no health checks.
    (container,) = plain["spec"]["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        del container[name]
    assert group["workerTemplate"] == plain
    policy = of_kind(found, "NetworkPolicy")["decode"]["spec"]
    own = [
        one for one in policy["ingress"] if one["from"] == [{"podSelector": policy["podSelector"]}]
    ]
    assert [port["port"] for one in own for port in one["ports"]] == [29501, 32768]
    flags = ("--values", str(EXAMPLES[NAMES.index("two-hosts")]), "--set", "keda.enabled=true")
    assert "set hosts to 1" in template(*flags).stderr


def test_routers_with_batches_have_a_volume_each(tmp_path: Path) -> None:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "9Gi"}}}
    given = values_file(tmp_path, {"router": {"batchVolume": claim}})
    found = manifests(*TRIAL, "--values", given)
    workload = workloads(found)["router"]
    assert workload["kind"] == "StatefulSet"
    (volume,) = workload["spec"]["volumeClaimTemplates"]
    assert volume["spec"] == claim
    mounts = container_of(workload)["volumeMounts"]
    (folder,) = (one["mountPath"] for one in mounts if one["name"] == volume["metadata"]["name"])
    settings = tomllib.loads(of_kind(found, "ConfigMap")["router"]["data"]["settings.toml"])
    assert Path(settings["batch_folder"]).parent == Path(folder)
    assert "volumeClaimTemplates" not in workloads(example("trial"))["router"]["spec"]


def test_planner_and_keda_do_not_both_set_the_replicas() -> None:
    flags = ("--set", "planner.enabled=true,planner.mode=kubernetes,keda.enabled=true")
    done = template(*TRIAL, *flags)
    assert "the planner sets the replicas already" in done.stderr


def test_an_older_kubernetes_is_refused() -> None:
    assert "kubeVersion" in template(*TRIAL, version="1.26").stderr


def test_only_the_planner_that_scales_may_do_so_and_may_do_nothing_else() -> None:
    found = example("planner")
    names = ["headrace-prefill", "headrace-decode"]
    (role,) = of_kind(found, "Role").values()
    assert role["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets"],
            "resourceNames": names,
            "verbs": ["get"],
        },
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": names,
            "verbs": ["get", "update"],
        },
    ]
    (binding,) = of_kind(found, "RoleBinding").values()
    assert [subject["name"] for subject in binding["subjects"]] == ["headrace-planner"]
    mounted = {
        name: item["spec"]["template"]["spec"]["automountServiceAccountToken"]
        for name, item in workloads(found).items()
    }
    assert mounted == {name: name == "planner" for name in COMPONENTS}
    assert not of_kind(example("tokens"), "Role", "RoleBinding")


def test_rules_and_dashboards_are_those_of_the_repository() -> None:
    found = example("tokens")
    telemetry = ROOT / "docker" / "telemetry"
    maps = of_kind(found, "ConfigMap")
    rules = yaml.safe_load((telemetry / "rules.yaml").read_text(encoding="utf-8"))
    assert yaml.safe_load(maps["rules"]["data"]["headrace.yaml"]) == rules
    (custom,) = of_kind(found, "PrometheusRule").values()
    assert custom["spec"] == rules
    dashboards = {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in (telemetry / "dashboards").glob("*.json")
    }
    assert {n: json.loads(t) for n, t in maps["dashboards"]["data"].items()} == dashboards
    # The rules name the job.
    (monitor,) = of_kind(found, "ServiceMonitor").values()
    label = monitor["spec"]["jobLabel"]
    watched = [
        item
        for item in of_kind(found, "Service").values()
        if monitor["spec"]["selector"]["matchLabels"].items() <= item["metadata"]["labels"].items()
    ]
    assert len(watched) == len(COMPONENTS)
    assert {item["metadata"]["labels"][label] for item in watched} == {"headrace"}
    for item in watched:
        assert [port["name"] for port in item["spec"]["ports"] if port["port"] == 9464] == [
            "metrics"
        ]


def test_the_pool_has_the_workers_that_generate_and_asks_the_routers() -> None:
    found = example("gateway")
    (pool,) = of_kind(found, "InferencePool").values()
    selector, services = pool["spec"]["selector"]["matchLabels"].items(), of_kind(found, "Service")
    selected = {
        name: {port["containerPort"] for port in container_of(item)["ports"]}
        for name, item in workloads(found).items()
        if selector <= item["spec"]["template"]["metadata"]["labels"].items()
    }
    assert selected.keys() == {"decode", "worker"}
    for ports in selected.values():
        assert {port["number"] for port in pool["spec"]["targetPorts"]} <= ports
    picker = pool["spec"]["endpointPickerRef"]
    service = services[picker["name"].removeprefix(f"{RELEASE}-")]
    assert picker["port"]["number"] in {port["port"] for port in service["spec"]["ports"]}


def test_certificates_have_the_roles_and_the_names_by_which_pods_are_called() -> None:
    found = example("tls")
    certificates = of_kind(found, "Certificate")
    assert set(certificates) == {*COMPONENTS, "operator"}
    for role, item in certificates.items():
        assert item["spec"]["uris"] == [f"spiffe://headrace.example/headrace/{role}"]
        assert item["spec"]["secretName"] == f"headrace-{role}"
    for component, workload in workloads(found).items():
        if component == "registry":
            continue
        # Only pods of a StatefulSet have a name each.
        assert workload["kind"] == "StatefulSet"
        service = workload["spec"]["serviceName"]
        assert (
            f"*.{service}.{NAMESPACE}.svc.cluster.local"
            in certificates[component]["spec"]["dnsNames"]
        )
        called = [word for word in container_of(workload)["args"] if "advertise=" in word]
        for word in called:
            host = word.partition("=")[2].partition(":")[0]
            assert host == f"$(POD_NAME).{service}.{NAMESPACE}.svc.cluster.local"


def test_devices_of_rdma_are_requested_beside_gpus() -> None:
    resources = container_of(workloads(example("rdma"))["decode"])["resources"]
    assert resources["limits"]["nvidia.com/mlx5_rdma"] == 1
    assert resources["limits"]["nvidia.com/gpu"] == 2
    assert resources["limits"] == resources["requests"]


def test_the_chart_has_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (project["version"],) * 2
