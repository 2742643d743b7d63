{{- define "flexd.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "flexd.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "flexd.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "flexd.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "flexd.selectorLabels" -}}
app.kubernetes.io/name: {{ include "flexd.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "flexd.labels" -}}
{{ include "flexd.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{/* The pod of the daemon, which the ranks find by the Service. */}}
{{- define "flexd.daemonLabels" -}}
{{ include "flexd.selectorLabels" . }}
app.kubernetes.io/component: daemon
{{- end -}}

{{- define "flexd.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ default .Chart.AppVersion .Values.image.tag }}{{ end }}
{{- end -}}

{{- define "flexd.graceSeconds" -}}
{{ add (ceil (default 20 .Values.config.shutdown_seconds)) .Values.terminationSlackSeconds }}
{{- end -}}

{{/* Pods of this release are trainers too, so the training's own traffic is theirs. */}}
{{- define "flexd.createsJob" -}}
{{- if and (eq .Values.shape "sidecar") (ne .Values.sidecar.workload "none") -}}true{{- end -}}
{{- end -}}

{{/* Bytes of a Kubernetes quantity. */}}
{{- define "flexd.bytes" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+([eE][+]?[0-9]+)?" $text -}}
{{- $units := dict "" 1 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- printf "%.0f" (mulf (float64 $number) (get $units (trimPrefix $number $text))) -}}
{{- end -}}

{{/* Rules that the schema cannot express, and those that the default values break, which have to pass `helm lint`. */}}
{{- define "flexd.validate" -}}
{{- if and (eq .Values.shape "sidecar") (semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "shape: sidecar needs native sidecar containers (Kubernetes 1.29 or later); this cluster is %s; use standalone" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.trainers) (not (include "flexd.createsJob" .)) -}}
{{- fail "networkPolicy.trainers: name the pods that are trainers, such as [{podSelector: {matchLabels: {app: trainer}}}]; only they reach the control port" -}}
{{- end -}}
{{- $tls := .Values.control.tls -}}
{{- if and (include "flexd.createsJob" .) (ne (empty $tls.existingSecret) (empty $tls.trainerSecret)) -}}
{{- fail "control.tls.existingSecret and control.tls.trainerSecret go together: with TLS, daemon and ranks each show a certificate" -}}
{{- end -}}
{{- $server := default dict .Values.config.server -}}
{{- $ports := dict "control.port" (int64 .Values.control.port) "metrics.port" (int64 .Values.metrics.port) -}}
{{- if not $server.unix_socket -}}
{{- $_ := set $ports "config.server.port" (int64 (default 9464 $server.port)) -}}
{{- end -}}
{{- if ne (len $ports) (len (uniq (values $ports))) -}}
{{- fail (printf "%s: two have the same port; give each its own" (toJson $ports)) -}}
{{- end -}}
{{- $sketch := default dict .Values.config.sketch -}}
{{- $needed := add (default 536870912 $sketch.memory_bytes) (default 0 $sketch.coaccess_memory_bytes) -}}
{{- with (default dict .Values.resources.limits).memory -}}
{{- if lt (float64 (include "flexd.bytes" .)) (float64 $needed) -}}
{{- fail (printf "resources.limits.memory: %v is below the %d bytes of config.sketch.memory_bytes and coaccess_memory_bytes: the kernel would end the daemon; give 1 GB and twice that" . (int64 $needed)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.shape "sidecar") (eq .Values.config.stream.source.kind "file_log") (gt (int .Values.sidecar.nodes) 1) -}}
{{- fail "config.stream.source.kind: a file log has the accesses of one node; with several it must be kafka or tap" -}}
{{- end -}}
{{- end -}}
