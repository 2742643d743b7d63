{{/*
The daemon's YAML: the user's values, with what the chart's ports, mounts, probes and shape rely on laid over them.
Takes the root.
*/}}
{{- define "flexd.config" -}}
{{- $values := .Values -}}
{{- $config := deepCopy $values.config -}}
{{- /* Helm merges the user's source into the default one, whose keys no other kind has. */ -}}
{{- if ne $config.stream.source.kind "kafka" -}}
{{- $_ := set $config.stream "source" (omit $config.stream.source "bootstrap_servers" "topic" "group_id") -}}
{{- end -}}
{{- $_ := set $config "server" (merge (dict "metrics_listen" (printf "0.0.0.0:%d" (int64 $values.metrics.port))) (default dict $config.server)) -}}
{{- $_ := set $config "state" (merge (dict "dir" "/var/lib/flexd") (default dict $config.state)) -}}
{{- /* A container that ends over and over would make the trainer's pod crash-loop. */ -}}
{{- if eq $values.shape "sidecar" -}}
{{- $_ := set $config "state" (merge $config.state (dict "on_unusable" "wait")) -}}
{{- end -}}
{{- $_ := set $config "log" (merge (default dict $config.log) (dict "format" "json")) -}}
{{- $control := dict "listen_host" "0.0.0.0" "listen_port" (int64 $values.control.port) "secret_file" "/etc/flexd/control/secret" -}}
{{- if $values.control.tls.existingSecret -}}
{{- $_ := set $control "tls" (dict "cert_file" "/etc/flexd/control-tls/tls.crt" "key_file" "/etc/flexd/control-tls/tls.key" "ca_file" "/etc/flexd/control-tls/ca.crt") -}}
{{- end -}}
{{- $_ := set $config "control" (merge $control (default dict $config.control)) -}}
{{- toYaml $config -}}
{{- end -}}
