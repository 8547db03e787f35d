{{/* Values that values.schema.json cannot check, because they depend on each other. */}}
{{- define "headrace.checks" -}}
{{- $values := .root.Values -}}
{{- if and (not $values.registry.store.endpoints) (ne (include "headrace.registryReplicas" .) "1") -}}
{{- fail "registry.replicas: several registries need one etcd; set registry.store.endpoints, or replicas to 1" -}}
{{- end -}}
{{- if and $values.registry.store.user (not $values.registry.store.tlsSecret) -}}
{{- fail "registry.store.user: a password needs TLS; set registry.store.tlsSecret" -}}
{{- end -}}
{{- if ne (empty $values.registry.store.user) (empty $values.registry.store.passwordSecret) -}}
{{- fail "registry.store: set user and passwordSecret together" -}}
{{- end -}}
{{- if and $values.metrics.enabled (not $values.metrics.keysSecret) -}}
{{- fail "metrics.keysSecret: name a Secret with metrics_keys and metrics_key" -}}
{{- end -}}
{{- if and $values.router.proxy.enabled (eq $values.credentials.kind "tls") -}}
{{- fail "router.proxy: clients' TLS would end at the proxy; set credentials.kind to tokens, or run a proxy of your own" -}}
{{- end -}}
{{- if and $values.keda.enabled $values.planner.enabled (eq $values.planner.mode "kubernetes") -}}
{{- fail "keda.enabled: the planner sets the replicas already; choose one of both" -}}
{{- end -}}
{{- if $values.credentials.certManager.enabled -}}
{{- if ne $values.credentials.kind "tls" -}}
{{- fail "credentials.certManager: set credentials.kind to tls" -}}
{{- end -}}
{{- if or (not $values.credentials.trustDomain) (not $values.credentials.certManager.issuerRef) -}}
{{- fail "credentials.certManager: set credentials.trustDomain and credentials.certManager.issuerRef" -}}
{{- end -}}
{{- end -}}
{{- range $role := list "prefill" "decode" "worker" -}}
{{- if gt (int (index $values $role).hosts) 1 -}}
{{- if include "headrace.scaled" (dict "root" $.root "component" $role) -}}
{{- fail (printf "%s.hosts: what scales workers sets the replicas of StatefulSets; set hosts to 1, or scale by hand" $role) -}}
{{- end -}}
{{- end -}}
{{- if and (index $values $role).hostNetwork $values.networkPolicy.enabled -}}
{{- fail (printf "%s.hostNetwork: network policies do not cover the host's network; set networkPolicy.enabled to false and use the rules of docs/security.md" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The components that run, as a list in YAML. */}}
{{- define "headrace.components" -}}
components:
  - registry
  - router
  - prefill
  - decode
  - worker
  {{- if .root.Values.planner.enabled }}
  - planner
  {{- end }}
{{- end -}}
