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

{{/* The daemon's YAML: the user's values, with what the chart's ports, mounts and probes rely on laid over them. */}}
{{- define "flexd.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $control := merge (dict "listen_host" "0.0.0.0" "listen_port" (int64 .Values.control.port) "secret_file" "/etc/flexd/control/secret") (default dict $config.control) -}}
{{- $_ := set $config "control" $control -}}
{{- $server := merge (dict "metrics_listen" (printf "0.0.0.0:%d" (int64 .Values.metrics.port))) (default dict $config.server) -}}
{{- $_ := set $config "server" $server -}}
{{- $_ := set $config "state" (merge (dict "dir" "/var/lib/flexd") (default dict $config.state)) -}}
{{- $_ := set $config "log" (merge (default dict $config.log) (dict "format" "json")) -}}
{{- toYaml $config -}}
{{- end -}}
