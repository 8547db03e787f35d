{{/* Names and labels. Every definition takes a dict with root, and some with component. */}}
{{- define "headrace.fullname" -}}
{{- $name := default .root.Chart.Name .root.Values.nameOverride -}}
{{- if .root.Values.fullnameOverride -}}
{{- .root.Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .root.Release.Name -}}
{{- .root.Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .root.Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "headrace.componentName" -}}
{{ include "headrace.fullname" . }}-{{ .component }}
{{- end -}}

{{- define "headrace.releaseLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end -}}

{{- define "headrace.selectorLabels" -}}
{{ include "headrace.releaseLabels" . }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "headrace.labels" -}}
{{ include "headrace.releaseLabels" . }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "headrace.metadata" -}}
name: {{ include "headrace.componentName" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "headrace.labels" . | nindent 2 }}
{{- end -}}

{{/* The DNS name of a Service of the release. */}}
{{- define "headrace.host" -}}
{{ include "headrace.componentName" . }}.{{ .root.Release.Namespace }}.svc.{{ .root.Values.clusterDomain }}
{{- end -}}

{{- define "headrace.metricsName" -}}
{{ include "headrace.fullname" . }}-metrics.{{ .root.Release.Namespace }}.svc.{{ .root.Values.clusterDomain }}
{{- end -}}

{{- define "headrace.credentialsSecret" -}}
{{ default (include "headrace.fullname" .) .root.Values.credentials.secretPrefix }}-{{ .component }}
{{- end -}}

{{- define "headrace.image" -}}
{{- if (index .root.Values .component).image -}}
{{- (index .root.Values .component).image -}}
{{- else -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end -}}
headrace/{{ .component }}:{{ default .root.Chart.AppVersion .root.Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* Whether gateways send requests to the component's pods. */}}
{{- define "headrace.servesGateways" -}}
{{- if and .root.Values.inferencePool.enabled (has .component (list "decode" "worker")) -}}true{{- end -}}
{{- end -}}

{{/* The open ports of a component, by name. */}}
{{- define "headrace.ports" -}}
{{- $values := .root.Values -}}
{{- if eq .component "registry" }}
internal: 7051
{{- else if eq .component "router" }}
internal: 7054
grpc: 7050
{{- if $values.router.http }}
http: 7056
{{- end }}
{{- if $values.router.status }}
status: 7057
{{- end }}
{{- if $values.inferencePool.enabled }}
picker: 9002
{{- end }}
{{- else if eq .component "prefill" }}
internal: 7052
{{- else if eq .component "decode" }}
internal: 7053
{{- else if eq .component "worker" }}
internal: 7055
{{- else if eq .component "planner" }}
internal: 7058
{{- end }}
{{- if include "headrace.servesGateways" . }}
http: 8000
{{- end }}
health: 7059
{{- if $values.metrics.enabled }}
metrics: 9464
{{- end }}
{{- end -}}

{{/* Whether something else than the chart sets the replicas of prefill or decode. */}}
{{- define "headrace.scaled" -}}
{{- if and (ne .component "worker") (or .root.Values.keda.enabled (and .root.Values.planner.enabled (eq .root.Values.planner.mode "kubernetes"))) -}}
true
{{- end -}}
{{- end -}}

{{- define "headrace.routerKind" -}}
{{- /* Certificates have names, and only pods of a StatefulSet have one each, and a volume each. */ -}}
{{- $isSet := or (eq .root.Values.credentials.kind "tls") (not (empty .root.Values.router.batchVolume)) -}}
{{ ternary "StatefulSet" "Deployment" $isSet }}
{{- end -}}

{{/* The registries: several need one etcd. */}}
{{- define "headrace.registryReplicas" -}}
{{- with .root.Values.registry -}}
{{- .replicas | default (ternary 2 1 (not (empty .store.endpoints))) -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the API keys of clients. Empty: clients need none. */}}
{{- define "headrace.apiKeysSecret" -}}
{{- $values := .root.Values -}}
{{- $isOpen := or $values.router.anonymousClients (eq $values.credentials.kind "tls") -}}
{{- $values.router.apiKeysSecret | default (ternary "" (printf "%s-api-keys" (include "headrace.fullname" .)) $isOpen) -}}
{{- end -}}

{{/* The replicas of a component. An upgrade keeps the number that a scaler has set: takes kind and scaled too. */}}
{{- define "headrace.replicas" -}}
{{- $live := dict -}}
{{- if .scaled -}}
{{- $live = lookup "apps/v1" .kind .root.Release.Namespace (include "headrace.componentName" .) -}}
{{- end -}}
{{ int (dig "spec" "replicas" (index .root.Values .component).replicas $live) }}
{{- end -}}
