{{/* The settings that the chart owns, as YAML. Values may set all others. */}}
{{- define "headrace.ownSettings" -}}
{{- $values := .root.Values -}}
{{- $ports := include "headrace.ports" . | fromYaml -}}
{{- $registry := printf "%s:7051" (include "headrace.host" (dict "root" .root "component" "registry")) -}}
internal_listen: "0.0.0.0:{{ $ports.internal }}"
health_listen: "0.0.0.0:{{ $ports.health }}"
drain_grace_s: {{ (index $values .component).drainSeconds }}
{{- if eq $values.credentials.kind "tokens" }}
token_file: /credentials/token
token_keys_file: /credentials/token_keys.pem
{{- else if eq $values.credentials.kind "tls" }}
tls_certificate_file: /credentials/tls.crt
tls_key_file: /credentials/tls.key
tls_authority_file: /credentials/ca.crt
{{- with $values.credentials.trustDomain }}
tls_trust_domain: {{ . | quote }}
{{- end }}
{{- else }}
insecure: true
{{- end }}
{{- if $values.metrics.enabled }}
metrics_listen: 0.0.0.0:9464
metrics_keys_file: /metrics/metrics_keys
{{- end }}
{{- if eq .component "registry" }}
internal_advertise: {{ $registry | quote }}
{{- with $values.registry.store }}
{{- if .endpoints }}
store: "etcd://{{ join "," .endpoints }}"
store_prefix: {{ .prefix | quote }}
{{- if .tlsSecret }}
store_tls_authority_file: /store-tls/ca.crt
{{- if .clientCertificate }}
store_tls_certificate_file: /store-tls/tls.crt
store_tls_key_file: /store-tls/tls.key
{{- end }}
{{- end }}
{{- if .user }}
store_user: {{ .user | quote }}
store_password_file: /store-password/password
{{- end }}
{{- else }}
store: memory
{{- end }}
{{- end }}
{{- else }}
registry: {{ $registry | quote }}
{{- end }}
{{- if eq .component "router" }}
listen: {{ ternary "127.0.0.1:7060" (printf "0.0.0.0:%v" $ports.grpc) $values.router.proxy.enabled | quote }}
http_listen: {{ ternary "0.0.0.0:7056" "" $values.router.http | quote }}
status_listen: {{ ternary "0.0.0.0:7057" "" $values.router.status | quote }}
endpoint_picker_listen: {{ ternary "0.0.0.0:9002" "" $values.inferencePool.enabled | quote }}
{{- if $values.router.batchVolume }}
# The folder of a volume may have lost+found.
batch_folder: /batches/headrace
{{- end }}
model: [{{ printf "%s=%s" $values.model.name $values.model.path | quote }}]
{{- end }}
{{- if has .component (list "prefill" "decode" "worker") }}
model: {{ $values.model.path | quote }}
served_model: {{ $values.model.name | quote }}
{{- end }}
{{- if has .component (list "decode" "worker") }}
http_listen: {{ ternary "0.0.0.0:8000" "" $values.inferencePool.enabled | quote }}
{{- end }}
{{- if or (eq .component "router") (include "headrace.servesGateways" .) }}
api_keys_file: {{ ternary "/api-keys/api_keys" "" (not (empty (include "headrace.apiKeysSecret" .))) | quote }}
anonymous_clients: {{ $values.router.anonymousClients }}
{{- end }}
{{- if eq .component "planner" }}
model: {{ $values.model.name | quote }}
mode: {{ $values.planner.mode }}
{{- if eq $values.planner.mode "kubernetes" }}
kubernetes_namespace: {{ .root.Release.Namespace | quote }}
kubernetes_prefill: "statefulset/{{ include "headrace.componentName" (dict "root" .root "component" "prefill") }}"
kubernetes_decode: "statefulset/{{ include "headrace.componentName" (dict "root" .root "component" "decode") }}"
{{- end }}
{{- if $values.planner.rules }}
settings_file: /etc/headrace/rules.toml
{{- end }}
internal_advertise: "{{ include "headrace.host" . }}:7058"
{{- end }}
{{- end -}}

{{/* The lines of a service's settings file. */}}
{{- define "headrace.settingsFile" -}}
{{- $own := include "headrace.ownSettings" . | fromYaml -}}
{{- $given := merge (dict) (index .root.Values .component).settings .root.Values.settings -}}
{{- range $name, $_ := $given -}}
{{- if hasKey $own $name -}}
{{- fail (printf "%s.settings.%s: other values of the chart set %s; remove it" $.component $name $name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := merge (dict) $own $given }}
{{ $name }} = {{ toJson $value }}
{{- end }}
{{- end -}}
