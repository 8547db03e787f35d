"""Definitions of the custom resources that the chart renders, for servers and checks without their projects.

They state the fields of each spec with its type, whether it is required, its values and its pattern, as the projects
define them. Fields that the chart has no use for are left out, and are therefore refused. To use another one, add it
from the definition that `source` names. Rules in CEL and empty defaults are left out: the API server of the tests is
older than the former, and refuses the latter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

Schema = dict[str, Any]

_DURATION: Final = (
    "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$"
)


def _text(**more: Any) -> Schema:
    return {"type": "string", **more}


def _number(minimum: int | None = None, maximum: int | None = None) -> Schema:
    limits = {"minimum": minimum, "maximum": maximum}
    return {"type": "integer", **{name: at for name, at in limits.items() if at is not None}}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _map(values: Schema, **more: Any) -> Schema:
    return {"type": "object", "additionalProperties": values, **more}


def _fields(*required: str, **fields: Schema) -> Schema:
    found: Schema = {"type": "object", "properties": fields}
    return {**found, "required": list(required)} if required else found


_TEXTS = _map(_text())
_NUMBER_OR_TEXT: Schema = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "x-kubernetes-int-or-string": True,
}
_FLAG: Schema = {"type": "boolean"}
_KEY = _fields("key", key=_text(), name=_text(), optional=_FLAG)
_SECRET_OR_MAP = _fields(secret=_KEY, configMap=_KEY)
_SELECTOR = _fields(
    matchLabels=_TEXTS,
    matchExpressions=_list(
        _fields("key", "operator", key=_text(), operator=_text(), values=_list(_text()))
    ),
)
_PORT = _fields("number", number=_number(1, 65_535))


@dataclass(frozen=True)
class Definition:
    """A custom resource in one version. `source` is the definition that the fields are from."""

    group: str
    version: str
    kind: str
    plural: str
    spec: Schema
    source: str
    annotations: Mapping[str, str]

    @property
    def resource(self) -> tuple[str, str]:
        """The API version and the kind, as manifests name them."""
        return f"{self.group}/{self.version}", self.kind

    @property
    def name(self) -> str:
        """The name of the CustomResourceDefinition."""
        return f"{self.plural}.{self.group}"

    def manifest(self) -> dict[str, Any]:
        """The CustomResourceDefinition."""
        schema = _fields("spec", spec=self.spec, status={"type": "object"})
        version = {
            "name": self.version,
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": schema},
        }
        names = {"kind": self.kind, "plural": self.plural, "singular": self.kind.lower()}
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": self.name, "annotations": dict(self.annotations)},
            "spec": {
                "group": self.group,
                "scope": "Namespaced",
                "names": names,
                "versions": [version],
            },
        }

    def strict_spec(self) -> Schema:
        """A JSON schema of the spec that refuses fields without a definition."""
        found = _without_other_fields(self.spec)
        assert isinstance(found, dict)
        return found


def _without_other_fields(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_other_fields(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _without_other_fields(one) for name, one in schema.items()}
    return {**found, "additionalProperties": False} if "properties" in schema else found


_SERVICE_MONITOR = Definition(
    group="monitoring.coreos.com",
    version="v1",
    kind="ServiceMonitor",
    plural="servicemonitors",
    spec=_fields(
        *("endpoints", "selector"),
        jobLabel=_text(),
        selector=_SELECTOR,
        namespaceSelector=_fields(any=_FLAG, matchNames=_list(_text())),
        endpoints=_list(
            _fields(
                port=_text(),
                targetPort=_NUMBER_OR_TEXT,
                path=_text(),
                scheme=_text(enum=["http", "https", "HTTP", "HTTPS"]),
                interval=_text(pattern=_DURATION),
                scrapeTimeout=_text(pattern=_DURATION),
                honorLabels=_FLAG,
                authorization=_fields(type=_text(), credentials=_KEY),
                tlsConfig=_fields(
                    ca=_SECRET_OR_MAP,
                    cert=_SECRET_OR_MAP,
                    keySecret=_KEY,
                    serverName=_text(),
                    insecureSkipVerify=_FLAG,
                ),
            )
        ),
    ),
    source="prometheus-operator 0.93, example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
    annotations={},
)
_PROMETHEUS_RULE = Definition(
    group="monitoring.coreos.com",
    version="v1",
    kind="PrometheusRule",
    plural="prometheusrules",
    spec=_fields(
        groups=_list(
            _fields(
                "name",
                name=_text(minLength=1),
                interval=_text(pattern=_DURATION),
                labels=_TEXTS,
                limit=_number(),
                rules=_list(
                    _fields(
                        "expr",
                        alert=_text(),
                        record=_text(),
                        expr=_NUMBER_OR_TEXT,
                        **{"for": _text(pattern=_DURATION)},
                        keep_firing_for=_text(pattern=_DURATION, minLength=1),
                        labels=_TEXTS,
                        annotations=_TEXTS,
                    )
                ),
            ),
            **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        )
    ),
    source="prometheus-operator 0.93, example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    annotations={},
)
_SCALED_OBJECT = Definition(
    group="keda.sh",
    version="v1alpha1",
    kind="ScaledObject",
    plural="scaledobjects",
    spec=_fields(
        *("scaleTargetRef", "triggers"),
        scaleTargetRef=_fields("name", apiVersion=_text(), kind=_text(), name=_text(minLength=1)),
        minReplicaCount=_number(0),
        maxReplicaCount=_number(1),
        idleReplicaCount=_number(0),
        cooldownPeriod=_number(0),
        initialCooldownPeriod=_number(0),
        pollingInterval=_number(1),
        triggers=_list(
            _fields(
                *("metadata", "type"),
                type=_text(minLength=1),
                name=_text(),
                metricType=_text(),
                metadata=_TEXTS,
                authenticationRef=_fields(
                    "name",
                    name=_text(),
                    kind=_text(enum=["TriggerAuthentication", "ClusterTriggerAuthentication"]),
                ),
                useCachedMetrics=_FLAG,
            ),
            minItems=1,
        ),
    ),
    source="KEDA 2.20, config/crd/bases/keda.sh_scaledobjects.yaml",
    annotations={},
)
_INFERENCE_POOL = Definition(
    group="inference.networking.k8s.io",
    version="v1",
    kind="InferencePool",
    plural="inferencepools",
    spec=_fields(
        *("selector", "targetPorts"),
        appProtocol=_text(enum=["http", "kubernetes.io/h2c"], default="http"),
        selector=_fields(
            "matchLabels",
            matchLabels=_map(
                _text(maxLength=63, pattern="^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"),
                minProperties=1,
                maxProperties=64,
            ),
        ),
        targetPorts=_list(_PORT, minItems=1, maxItems=8),
        endpointPickerRef=_fields(
            "name",
            group=_text(maxLength=253),
            kind=_text(minLength=1, maxLength=63, default="Service"),
            name=_text(minLength=1, maxLength=253),
            port=_PORT,
            failureMode=_text(enum=["FailOpen", "FailClose"], default="FailClose"),
        ),
    ),
    source=(
        "Gateway API Inference Extension of 2026-08-18, "
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"
    ),
    # A server refuses definitions of Kubernetes' own groups without it.
    annotations={
        "api-approved.kubernetes.io": (
            "https://github.com/kubernetes-sigs/gateway-api-inference-extension/pull/1173"
        )
    },
)
_CERTIFICATE = Definition(
    group="cert-manager.io",
    version="v1",
    kind="Certificate",
    plural="certificates",
    spec=_fields(
        *("issuerRef", "secretName"),
        secretName=_text(),
        duration=_text(),
        renewBefore=_text(),
        dnsNames=_list(_text()),
        ipAddresses=_list(_text()),
        uris=_list(_text()),
        # Only the ones of services and clients.
        usages=_list(
            _text(enum=["digital signature", "key encipherment", "server auth", "client auth"])
        ),
        privateKey=_fields(
            algorithm=_text(enum=["RSA", "ECDSA", "Ed25519"]),
            encoding=_text(enum=["PKCS1", "PKCS8"]),
            rotationPolicy=_text(enum=["Never", "Always"]),
            size=_number(),
        ),
        issuerRef=_fields("name", name=_text(), kind=_text(), group=_text()),
    ),
    source="cert-manager 1.21, deploy/crds/cert-manager.io_certificates.yaml",
    annotations={},
)
# The chart's tests compare the templates of pods with those of a StatefulSet.
_POD_TEMPLATE: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_LEADER_WORKER_SET = Definition(
    group="leaderworkerset.x-k8s.io",
    version="v1",
    kind="LeaderWorkerSet",
    plural="leaderworkersets",
    spec=_fields(
        "leaderWorkerTemplate",
        replicas=_number(),
        leaderWorkerTemplate=_fields(
            "workerTemplate",
            size=_number(),
            restartPolicy=_text(enum=["RecreateGroupOnPodRestart", "None"]),
            leaderTemplate=_POD_TEMPLATE,
            workerTemplate=_POD_TEMPLATE,
        ),
    ),
    source="LeaderWorkerSet, api/leaderworkerset/v1/leaderworkerset_types.go",
    annotations={},
)
DEFINITIONS: Final = (
    _LEADER_WORKER_SET,
    _SERVICE_MONITOR,
    _PROMETHEUS_RULE,
    _SCALED_OBJECT,
    _INFERENCE_POOL,
    _CERTIFICATE,
)
