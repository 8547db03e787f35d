{{/* Parts of every pod. All take a dict with root and component. */}}
{{- define "headrace.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "headrace.containerSecurity" -}}
{{- $rdma := dig "rdma" "enabled" false (index .root.Values .component) -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
privileged: false
capabilities:
  drop: [ALL]
  {{- if $rdma }}
  # RDMA adapters read and write locked memory.
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{- define "headrace.probes" -}}
{{- $own := index .root.Values .component -}}
{{- $port := (include "headrace.ports" . | fromYaml).health -}}
# A worker answers once its engine is ready.
startupProbe:
  grpc: { port: {{ $port }}, service: live }
  periodSeconds: 5
  failureThreshold: {{ max 1 (div $own.startSeconds 5) }}
readinessProbe:
  grpc: { port: {{ $port }} }
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 3
livenessProbe:
  grpc: { port: {{ $port }}, service: live }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "headrace.volumeMounts" -}}
{{- $values := .root.Values -}}
- { name: settings, mountPath: /etc/headrace, readOnly: true }
- { name: temporary, mountPath: /tmp }
{{- if ne $values.credentials.kind "insecure" }}
- { name: credentials, mountPath: /credentials, readOnly: true }
{{- end }}
{{- if $values.metrics.enabled }}
- { name: metrics-keys, mountPath: /metrics, readOnly: true }
{{- end }}
{{- if eq (include "headrace.takesApiKeys" .) "true" }}
- { name: api-keys, mountPath: /api-keys, readOnly: true }
{{- end }}
{{- if eq .component "registry" }}
{{- if $values.registry.store.tlsSecret }}
- { name: store-tls, mountPath: /store-tls, readOnly: true }
{{- end }}
{{- if $values.registry.store.passwordSecret }}
- { name: store-password, mountPath: /store-password, readOnly: true }
{{- end }}
{{- end }}
{{- if and (eq .component "router") $values.router.batchVolume }}
- { name: batches, mountPath: /batches }
{{- end }}
{{- if has .component (list "router" "prefill" "decode" "worker") }}
{{- if $values.model.volume }}
- { name: models, mountPath: /models, readOnly: true }
{{- end }}
{{- end }}
{{- if has .component (list "prefill" "decode" "worker") }}
- { name: shared-memory, mountPath: /dev/shm }
{{- end }}
{{- end -}}

{{- define "headrace.takesApiKeys" -}}
{{- $serves := or (eq .component "router") (include "headrace.servesGateways" .) -}}
{{- if and $serves (include "headrace.apiKeysSecret" .) -}}true{{- end -}}
{{- end -}}

{{- define "headrace.volumes" -}}
{{- $values := .root.Values -}}
{{- $own := index $values .component -}}
- name: settings
  configMap: { name: {{ include "headrace.componentName" . }} }
- name: temporary
  emptyDir: { sizeLimit: {{ default "64Mi" $own.temporary }} }
{{- if ne $values.credentials.kind "insecure" }}
- name: credentials
  secret: { secretName: {{ include "headrace.credentialsSecret" . }}, defaultMode: 0440 }
{{- end }}
{{- if $values.metrics.enabled }}
- name: metrics-keys
  secret:
    secretName: {{ $values.metrics.keysSecret }}
    defaultMode: 0440
    items: [{ key: metrics_keys, path: metrics_keys }]
{{- end }}
{{- if eq (include "headrace.takesApiKeys" .) "true" }}
- name: api-keys
  secret: { secretName: {{ include "headrace.apiKeysSecret" . }}, defaultMode: 0440 }
{{- end }}
{{- if eq .component "registry" }}
{{- with $values.registry.store.tlsSecret }}
- name: store-tls
  secret: { secretName: {{ . }}, defaultMode: 0440 }
{{- end }}
{{- with $values.registry.store.passwordSecret }}
- name: store-password
  secret: { secretName: {{ . }}, defaultMode: 0440 }
{{- end }}
{{- end }}
{{- if has .component (list "router" "prefill" "decode" "worker") }}
{{- with $values.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- if has .component (list "prefill" "decode" "worker") }}
- name: shared-memory
  emptyDir: { medium: Memory, sizeLimit: {{ $own.sharedMemory }} }
{{- end }}
{{- end -}}

{{/* host:port flags that only the pod knows. */}}
{{- define "headrace.arguments" -}}
{{- $values := .root.Values -}}
{{- $ports := include "headrace.ports" . | fromYaml -}}
{{- $host := "$(POD_IP)" -}}
{{- if eq $values.credentials.kind "tls" -}}
{{- $service := ternary (printf "%s-pods" .component) .component (eq .component "router") -}}
{{- $host = printf "$(POD_NAME).%s" (include "headrace.host" (dict "root" .root "component" $service)) -}}
{{- end -}}
- --config=/etc/headrace/settings.toml
{{- if has .component (list "router" "prefill" "decode" "worker") }}
- --internal-advertise={{ $host }}:{{ $ports.internal }}
{{- if $ports.grpc }}
- --advertise={{ $host }}:{{ $ports.grpc }}
{{- end }}
{{- end }}
{{- if eq .component "router" }}
- --router-id=$(POD_NAME)
{{- else if eq .component "planner" }}
- --planner-id=$(POD_NAME)
{{- else if has .component (list "prefill" "decode" "worker") }}
- --worker-id=$(POD_NAME)
{{- $own := index $values .component }}
{{- if gt (int $own.hosts) 1 }}
{{- $given := dig "engine_args" "" (merge (dict) $own.settings $values.settings) }}
- {{ printf "--engine-args=%s --nnodes %d --node-rank $(LWS_WORKER_INDEX) --master-addr $(LWS_LEADER_ADDRESS)" $given (int $own.hosts) | toJson }}
{{- end }}
{{- end }}
{{- if include "headrace.servesGateways" . }}
{{- end }}
{{- end -}}

{{- define "headrace.resources" -}}
{{- $own := index .root.Values .component -}}
{{- $resources := deepCopy (default (dict) $own.resources) -}}
{{- if dig "rdma" "enabled" false $own -}}
{{- $device := dict $own.rdma.resource $own.rdma.count -}}
{{- $resources = mergeOverwrite $resources (dict "limits" $device) (dict "requests" $device) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Envoy before the gRPC port of a router. It ends after the router, which drains. */}}
{{- define "headrace.proxy" -}}
{{- $proxy := .root.Values.router.proxy -}}
- name: proxy
  image: {{ $proxy.image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [envoy, -c, /etc/headrace/envoy.yaml, --disable-hot-restart, -l, warning]
  ports: [{ name: grpc, containerPort: 7050 }]
  readinessProbe: { tcpSocket: { port: grpc }, periodSeconds: 5 }
  lifecycle:
    preStop: { exec: { command: [sleep, "{{ add .root.Values.router.drainSeconds 10 }}"] } }
  resources:
    {{- toYaml $proxy.resources | nindent 4 }}
  securityContext:
    {{- include "headrace.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - { name: settings, mountPath: /etc/headrace, readOnly: true }
{{- end -}}

{{/* The template of a component's pods. */}}
{{- define "headrace.podTemplate" -}}
{{- $values := .root.Values -}}
{{- $own := index $values .component -}}
{{- $proxied := and (eq .component "router") $values.router.proxy.enabled -}}
metadata:
  labels:
    {{- include "headrace.labels" . | nindent 4 }}
    {{- if include "headrace.servesGateways" . }}
    headrace/gateways: "true"
    {{- end }}
  annotations:
    # A pod starts again when its settings change. Credentials are read again without that.
    checksum/settings: {{ printf "%s%s" (include "headrace.settingsFile" .) (ternary (.root.Files.Get "files/envoy.yaml") $own.rules $proxied) | sha256sum }}
    {{- with $own.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "headrace.componentName" . }}
  automountServiceAccountToken: {{ and (eq .component "planner") (eq $values.planner.mode "kubernetes") }}
  enableServiceLinks: false
  securityContext:
    {{- include "headrace.podSecurity" . | nindent 4 }}
  terminationGracePeriodSeconds: {{ add $own.drainSeconds 20 }}
  {{- if $own.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- range $name := list "runtimeClassName" "priorityClassName" }}
  {{- with index $own $name }}
  {{ $name }}: {{ . }}
  {{- end }}
  {{- end }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $name := list "nodeSelector" "tolerations" "affinity" }}
  {{- with index $own $name }}
  {{ $name }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  topologySpreadConstraints:
    {{- if $own.topologySpreadConstraints }}
    {{- toYaml $own.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "headrace.selectorLabels" . | nindent 10 }}
    {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "headrace.image" . }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args:
        {{- include "headrace.arguments" . | nindent 8 }}
      env:
        - { name: POD_NAME, valueFrom: { fieldRef: { fieldPath: metadata.name } } }
        - { name: POD_IP, valueFrom: { fieldRef: { fieldPath: status.podIP } } }
        {{- with $own.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $name, $port := omit (include "headrace.ports" . | fromYaml) (ternary "grpc" "" $proxied) }}
        - { name: {{ $name }}, containerPort: {{ $port }} }
        {{- end }}
      {{- if not .servesNothing }}
      {{- include "headrace.probes" . | nindent 6 }}
      {{- end }}
      lifecycle:
        # Other pods send new requests here until they learn of the end.
        preStop: { exec: { command: [/bin/sleep, "5"] } }
      {{- with include "headrace.resources" . | fromYaml }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "headrace.containerSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "headrace.volumeMounts" . | nindent 8 }}
    {{- if $proxied }}
    {{- include "headrace.proxy" . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "headrace.volumes" . | nindent 4 }}
{{- end -}}
