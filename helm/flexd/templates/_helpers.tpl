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

{{/* The pod that leads, or may lead: what the ranks and the followers find by the Service. */}}
{{- define "flexd.leaderLabels" -}}
{{ include "flexd.selectorLabels" . }}
app.kubernetes.io/component: leader
{{- end -}}

{{- define "flexd.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ default .Chart.AppVersion .Values.image.tag }}{{ end }}
{{- end -}}

{{- define "flexd.graceSeconds" -}}
{{ add (ceil (default 20 .Values.config.shutdown_seconds)) .Values.terminationSlackSeconds }}
{{- end -}}

{{- define "flexd.withFollowers" -}}
{{- if and (eq .Values.shape "sidecar") (gt (int .Values.sidecar.nodes) 1) -}}true{{- end -}}
{{- end -}}

{{- define "flexd.highlyAvailable" -}}
{{- if and (eq .Values.shape "standalone") .Values.highAvailability.enabled -}}true{{- end -}}
{{- end -}}

{{/* Pods of this release are trainers too, so the training's own traffic is theirs. */}}
{{- define "flexd.createsJob" -}}
{{- if and (eq .Values.shape "sidecar") (ne .Values.sidecar.workload "none") -}}true{{- end -}}
{{- end -}}

{{/* Rules that the schema cannot express. */}}
{{- define "flexd.validate" -}}
{{- $ha := .Values.highAvailability -}}
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
{{- if and $ha.enabled (eq .Values.shape "sidecar") -}}
{{- fail "highAvailability.enabled: stand-bys are for shape standalone; in the sidecar shape the job restarts its leader" -}}
{{- end -}}
{{- if and $ha.enabled (not .Values.state.persistent) -}}
{{- fail "state.persistent: a stand-by goes on from the leader's state, so highAvailability needs a shared volume" -}}
{{- end -}}
{{- if and $ha.enabled (eq .Values.state.accessMode "ReadWriteOnce") -}}
{{- fail "state.accessMode: ReadWriteOnce cannot be mounted by leader and stand-by; highAvailability needs ReadWriteMany" -}}
{{- end -}}
{{- if and $ha.enabled (gt (mulf 3.0 $ha.renewSeconds) (float64 $ha.durationSeconds)) -}}
{{- fail "highAvailability.renewSeconds: at most a third of durationSeconds" -}}
{{- end -}}
{{- if and (eq .Values.shape "sidecar") (ne .Values.config.stream.source.kind "kafka") (gt (int .Values.sidecar.nodes) 1) -}}
{{- fail "config.stream.source.kind: daemons on several nodes share a stream, so it must be kafka" -}}
{{- end -}}
{{- end -}}
